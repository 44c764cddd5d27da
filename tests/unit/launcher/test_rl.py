"""The command `rl` up to the start of its parts: one configuration for all of them, refusals, the dry run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from contract.choice import choose_checkpoint
from contract.commit import commit
from contract.errors import CheckpointError, ConfigError
from contract.layout import RunFolder
from contract.record import FORMAT_VERSION, CommitRecord, FileRecord
from contract.settings.load import load_file, load_settings
from inference.config import InferenceConfig
from launcher import rl, rl_run
from launcher.rl_config import RLConfig
from launcher.rl_start import Start, decide_start, remove_leftovers, run_id_of
from orchestrator.config import OrchestratorConfig
from trainer.config import RLTrainConfig

_ROOT = Path(__file__).parents[3]
_CONFIGS = sorted(
    path
    for path in (_ROOT / "configs").rglob("*.toml")
    if "sources" in tomllib.loads(path.read_text())  # which every RL run has, and no SFT run
)
_FILE = """
max_steps = 3
seq_len = 64
[model]
name = "some/model"
[sampling]
max_tokens = 16
[[sources]]
environment = "sort-letters"
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., RLConfig]:
    """Reads the file above with flags."""
    path = tmp_path / "rl.toml"
    path.write_text(_FILE)

    def read(*flags: str) -> RLConfig:
        argv = ["@", str(path), "--output-dir", str(tmp_path / "out"), *flags]
        return load_settings(RLConfig, argv, prog="rl", description="").settings

    return read


def _folder(config: RLConfig) -> RunFolder:
    return RunFolder.of_run(config.output_dir, config.run_name, None)


def _commit_step(folder: RunFolder, step: int, *components: str) -> None:
    """A checkpoint that holds one file of each component."""
    partial = folder.checkpoints / f"step_{step}.partial"
    files = {}
    for name in components:
        (partial / name).mkdir(parents=True)
        (partial / name / "state").write_bytes(b"x")
        files[f"{name}/state"] = FileRecord(1, None)
    record = CommitRecord(FORMAT_VERSION, step, 1, list(components), files, {}, "", "2026-01-01T00:00:00Z")
    commit(partial, folder.checkpoints / f"step_{step}", record)


def test_an_override_of_a_shared_key_reaches_every_part(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(_FILE)
    flags = ["--model.name", "other/model", "--seq-len", "128", "--max-steps", "9", "--seed", "5"]
    flags += ["--channel.type", "zmq", "--inference.api-key", "secret", "--log.level", "debug"]
    assert rl.main(["@", str(path), *flags, "--output-dir", str(tmp_path), "--dry-run"]) == 0
    config = tmp_path / "rl" / "config"
    trainer = load_file(RLTrainConfig, config / "trainer.toml")
    orchestrator = load_file(OrchestratorConfig, config / "orchestrator.toml")
    inference = load_file(InferenceConfig, config / "inference.toml")
    assert [part.model.name for part in (trainer, orchestrator, inference)] == ["other/model"] * 3
    assert (trainer.seq_len, orchestrator.seq_len, inference.max_len) == (128, 128, 128)
    assert (trainer.max_steps, orchestrator.max_steps) == (9, 9)
    assert (trainer.seed, orchestrator.seed) == (5, 5)
    assert trainer.channel == orchestrator.channel
    assert (trainer.server_key, orchestrator.server_key, inference.api_key) == ("secret",) * 3
    assert {entry.stat().st_mode & 0o077 for entry in config.iterdir()} == {0}, "others can read the key"
    assert [part.log.level for part in (trainer, orchestrator, inference)] == ["debug"] * 3
    address = f"http://127.0.0.1:{inference.port}"
    assert (trainer.servers, orchestrator.servers) == ([address], [address])


def test_a_resolved_configuration_reads_back_as_it_was(tmp_path: Path, load: Callable[..., RLConfig]) -> None:
    flags = ["--output-dir", str(tmp_path / "out"), "--evaluation.sources", '[{"environment": "arithmetic"}]']
    assert rl.main(["@", str(tmp_path / "rl.toml"), *flags, "--dry-run"]) == 0
    assert load_file(RLConfig, tmp_path / "out" / "rl" / "config" / "rl.toml") == load(*flags[2:])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--servers", '["http://a:1"]', "--inference.port", "7"], "inference.port would change nothing"),
        (["--servers", '["a:1"]'], "is no address"),
        (["--server-key", "k"], "inference.api_key"),
        (["--sampling.max-tokens", "64"], "leaves no room for a prompt"),
        (["--inference.max-len", "32"], "inference.max_len"),
        (["--sampling.top-p", "0.9"], "sampling.top_p = 0.9 draws from a part .* Set it to 1, or remove it"),
        (["--sampling.top-k", "20"], "sampling.top_k = 20 draws .*: evaluation.sampling.top_k"),
        (["--sampling.min-tokens", "2"], "sampling.min_tokens = 2 draws from a part of the tokens"),
        (["--sampling.temperature", "1e-20"], "temperature = 1e-20 must be 0, or a number from 1e-06"),
        (["--resume.skip-data"], "go together"),
        (["--resume", "--clean"], "clean deletes the run"),
        (["--inference.host", "0.0.0.0"], "api_key"),
        (["--evaluation.sources", '[{"environment": "arithmetic", "weight": 2.0}]'], "would change nothing"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    load: Callable[..., RLConfig], flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*flags)


def test_samples_longer_than_a_local_model_takes_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rl.toml").write_text(_FILE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"text_config": {"max_position_embeddings": 100}}')
    flags = ["--model.name", str(tmp_path / "model"), "--output-dir", str(tmp_path / "out"), "--seq-len"]
    assert rl.main(["@", str(tmp_path / "rl.toml"), *flags, "101"]) == 2
    assert "was made for sequences of at most 100 tokens; lower seq_len" in capsys.readouterr().err
    assert not (tmp_path / "out/rl/config").exists()
    assert rl.main(["@", str(tmp_path / "rl.toml"), *flags, "100", "--dry-run"]) == 0
    assert "at most 100" not in capsys.readouterr().err


def test_what_only_an_evaluation_may_draw_with_is_taken_there(load: Callable[..., RLConfig]) -> None:
    source = ["--evaluation.sources", '[{"environment": "arithmetic"}]']
    flags = {"top-p": "0.9", "top-k": "20", "min-tokens": "2", "temperature": "0"}
    words = [word for name, value in flags.items() for word in (f"--evaluation.sampling.{name}", value)]
    evaluation = load(*source, *words).evaluation
    assert evaluation is not None and evaluation.sampling is not None
    drawn = evaluation.sampling
    assert (drawn.top_p, drawn.top_k, drawn.min_tokens, drawn.temperature) == (0.9, 20, 2, 0)


def test_the_quick_answers_import_no_torch(tmp_path: Path, load: Callable[..., RLConfig]) -> None:
    code = (
        "import sys\nfrom launcher.rl import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)"
    )
    argv = ["@", str(tmp_path / "rl.toml"), "--output-dir", str(tmp_path), "--dry-run"]
    subprocess.run([sys.executable, "-c", code, *argv], check=True, capture_output=True)


def test_there_are_configurations_to_check() -> None:
    assert {_ROOT / "configs/qwen3-rl.toml", _ROOT / "configs/debug/rl.toml"} <= set(_CONFIGS)


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: str(path.relative_to(_ROOT)))
def test_a_shipped_configuration_passes_a_dry_run_and_resolves_to_itself(path: Path, tmp_path: Path) -> None:
    assert rl.main(["@", str(path), "--output-dir", str(tmp_path), "--dry-run"]) == 0
    (resolved,) = tmp_path.rglob("rl.toml")
    argv = ["@", str(path), "--output-dir", str(tmp_path)]
    assert load_file(RLConfig, resolved) == load_settings(RLConfig, argv, prog="rl", description="").settings


def test_a_dry_run_leaves_the_configuration_of_a_run_alone(
    tmp_path: Path, load: Callable[..., RLConfig]
) -> None:
    folder = _folder(load())
    folder.config.mkdir(parents=True)
    folder.metrics.write_text("")
    (folder.config / "trainer.toml").write_text("of the run")
    argv = ["@", str(tmp_path / "rl.toml"), "--output-dir", str(tmp_path / "out"), "--dry-run"]
    assert rl.main(argv) == 0
    assert (folder.config / "trainer.toml").read_text() == "of the run"
    names = {entry.name for entry in folder.config.iterdir()}
    assert {f"dry_run_{part}.toml" for part in ("rl", "trainer", "orchestrator", "inference")} <= names
    assert not folder.logs.exists()


def test_every_file_with_a_key_is_for_its_owner_alone(tmp_path: Path, load: Callable[..., RLConfig]) -> None:
    folder = _folder(load())
    argv = ["@", str(tmp_path / "rl.toml"), "--output-dir", str(tmp_path / "out"), "--dry-run"]
    assert rl.main([*argv, "--inference.api-key", "k"]) == 0
    modes = {entry.name: entry.stat().st_mode & 0o777 for entry in folder.config.iterdir()}
    names = ("rl", "trainer", "orchestrator", "inference")
    assert modes == {f"{name}.toml": 0o600 for name in names}


def test_a_run_without_a_number_of_updates_is_refused(tmp_path: Path, load: Callable[..., RLConfig]) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(path.read_text().replace("max_steps = 3\n", ""))
    with pytest.raises(ConfigError, match="max_steps"):
        load()
    with pytest.raises(ConfigError, match="max_steps"):
        load("--max-steps", "None")
    assert RLConfig.model_fields["max_steps"].description == "Updates in the run, counted from step 0."


def test_a_port_that_is_in_use_is_refused_with_its_key(load: Callable[..., RLConfig]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flags, key in ((["--inference.port", port], "inference.port"),
                           (["--channel.type", "zmq", "--channel.port", port], "channel.port")):  # fmt: skip
            with pytest.raises(ConfigError, match=f"{key} = {port} is in use"):
                rl_run.make_plan(load(*flags))


def test_the_port_of_the_channel_is_one_that_is_free_where_it_is_bound(load: Callable[..., RLConfig]) -> None:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = str(listener.getsockname()[1])
        flags = ["--channel.type", "zmq", "--channel.port", port, "--channel.host", "no.such.host.invalid"]
        plan = rl_run.make_plan(load(*flags, "--channel.bind", "127.0.0.3"))
        assert plan.config.channel.port == int(port)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ConfigError, match=rf"channel.port = {port} is in use at 127\.0\.0\.2"):
            rl_run.make_plan(load(*flags, "--channel.bind", "127.0.0.2"))


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ([], "auto"),
        (["--model.compute-dtype", "bfloat16"], "bfloat16"),
        (["--deployment.device", "cpu"], "float32"),
        (["--model.compute-dtype", "bfloat16", "--inference.engine.dtype", "float32"], "float32"),
    ],
)
def test_the_policy_server_computes_in_the_type_that_the_trainer_is_told_to(
    load: Callable[..., RLConfig], flags: list[str], dtype: str
) -> None:
    assert load(*flags).policy_server(8000, "id").engine.dtype == dtype


def test_servers_that_run_already_are_used_and_none_is_started(load: Callable[..., RLConfig]) -> None:
    plan = rl_run.make_plan(load("--servers", '["http://gpu-box:8000"]', "--server-key", "k"))
    parts = plan.parts("id", None)
    assert sorted(parts) == ["orchestrator", "trainer"]
    trainer, orchestrator = parts["trainer"], parts["orchestrator"]
    assert isinstance(trainer, RLTrainConfig) and isinstance(orchestrator, OrchestratorConfig)
    assert trainer.servers == orchestrator.servers == ["http://gpu-box:8000"]
    assert trainer.server_key == orchestrator.server_key == "k"


def test_all_parts_go_on_from_the_newest_step_that_holds_the_state_of_both(
    load: Callable[..., RLConfig],
) -> None:
    folder = _folder(load())
    _commit_step(folder, 10, "trainer", "orchestrator")
    _commit_step(folder, 20, "trainer")
    config = load("--resume")
    start = decide_start(config, folder)
    assert (start.step, start.checkpoint) == (10, folder.checkpoints / "step_10")
    assert start.resume_dir(config) == str(folder.checkpoints / "step_10")
    resume = start.fixed(config).resume
    assert resume is not None and (resume.step, resume.dir) == (None, str(start.checkpoint))


def test_steps_that_are_counted_anew_begin_with_the_weights_of_the_chosen_checkpoint(
    load: Callable[..., RLConfig],
) -> None:
    folder = _folder(load())
    _commit_step(folder, 10, "trainer", "orchestrator")
    config = load("--resume.step", "10", "--resume.skip-progress", "--resume.skip-data")
    start = decide_start(config, folder)
    resume = start.fixed(config).resume
    assert start.step == 0 and resume is not None
    # What the trainer chooses by.
    chosen = choose_checkpoint(folder, step=resume.step, place=resume.dir)
    assert chosen is not None and chosen.entry.path == folder.checkpoints / "step_10"


def test_a_start_from_the_weights_of_another_run_needs_no_state_of_the_orchestrator(
    load: Callable[..., RLConfig], tmp_path: Path
) -> None:
    other = RunFolder(tmp_path / "sft")
    _commit_step(other, 7, "trainer")
    place = str(other.checkpoints / "step_7")
    with pytest.raises(CheckpointError, match="orchestrator"):
        decide_start(load("--resume.dir", place), _folder(load()))
    config = load("--resume.dir", place, "--resume.skip-progress", "--resume.skip-data")
    start = decide_start(config, _folder(config))
    assert start.step == 0 and start.resume_dir(config) is None
    resume = start.fixed(config).resume
    assert resume is not None and resume.dir == place


def test_a_run_that_died_before_its_first_checkpoint_starts_anew(load: Callable[..., RLConfig]) -> None:
    config = load("--resume")
    folder = _folder(config)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        decide_start(config, folder)
    (folder.logs / "attempt_1").mkdir(parents=True)
    start = decide_start(config, folder)
    assert start == Start() and start.fixed(config).resume is None


def test_batches_and_weights_on_their_way_are_removed_and_nothing_else(
    load: Callable[..., RLConfig],
) -> None:
    folder = _folder(load())
    for path in (folder.channel / "frames", folder.broadcasts / "version_3", folder.rollouts):
        path.mkdir(parents=True)
    remove_leftovers(folder)
    assert [path.name for path in folder.root.iterdir()] == ["rollouts"]


def test_the_id_of_a_run_is_made_once(load: Callable[..., RLConfig], tmp_path: Path) -> None:
    folder, other = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    for place in (folder, other):
        place.root.mkdir()
    first = run_id_of(folder)
    assert first and run_id_of(folder) == first and run_id_of(other) != first


def test_under_torchrun_rl_refuses_to_start(
    tmp_path: Path, load: Callable[..., RLConfig], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    assert rl.main(["@", str(tmp_path / "rl.toml"), "--output-dir", str(tmp_path)]) == 2
    assert "without torchrun" in capsys.readouterr().err
