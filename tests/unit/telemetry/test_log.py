"""What reaches the console and what the log file; how a run's last error is shown."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from contract.errors import ConfigError, Interrupted, RunFolderError
from telemetry.log import (
    adopt_libraries,
    configure_logging,
    current_log_file,
    log_to_file,
    once,
    report_error,
)

own = logging.getLogger("trainer.something")
library = logging.getLogger("httpx")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    names = ("contract", "telemetry", "launcher", "trainer", "orchestrator", "inference")
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old_level in levels.items():
        logging.getLogger(name).setLevel(old_level)
    logging.captureWarnings(False)


def _say_everything() -> None:
    own.debug("own debug")
    own.info("own [bold]info[/bold]")
    own.warning("own warning " + "x" * 100)
    library.debug("library debug")
    library.info("library info")
    library.warning("library warning")
    warnings.warn("python warning", UserWarning, stacklevel=1)
    log_to_file(own, "file only")


def test_the_console_shows_own_messages_and_only_warnings_of_libraries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("info", rank=0, log_file=tmp_path / "rank_0.log", console=True)
    _say_everything()
    shown = capsys.readouterr().out
    assert "own [bold]info[/bold]" in shown
    assert "warning: own warning " + "x" * 100 in shown
    assert "library warning" in shown
    for hidden in ("own debug", "library debug", "library info", "python warning", "file only"):
        assert hidden not in shown


def test_the_file_has_everything_but_debug_messages_of_libraries(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "attempt_1" / "rank_3.log"
    configure_logging("error", rank=3, log_file=path, console=True)
    _say_everything()
    text = path.read_text()
    for message in ("own debug", "own [bold]info", "library info", "python warning", "file only"):
        assert message in text
    assert "library debug" not in text
    first = text.splitlines()[0]
    assert first.startswith("20") and "rank 3 DEBUG   trainer.something: own debug" in first


def test_other_ranks_are_silent_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("debug", rank=1, log_file=tmp_path / "rank_1.log", console=True)
    own.error("trouble")
    assert capsys.readouterr() == ("", "")
    assert "trouble" in (tmp_path / "rank_1.log").read_text()


def test_a_process_without_console_and_file_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", rank=0, log_file=None, console=False)
    own.error("trouble")
    assert capsys.readouterr() == ("", "")
    assert current_log_file() is None


def test_a_second_configuration_replaces_the_first(tmp_path: Path) -> None:
    configure_logging("info", rank=0, log_file=tmp_path / "a.log", console=False)
    configure_logging("info", rank=0, log_file=tmp_path / "b.log", console=False)
    own.info("late")
    assert "late" not in (tmp_path / "a.log").read_text()
    assert (tmp_path / "b.log").read_text().count("late") == 1
    assert current_log_file() == tmp_path / "b.log"


def test_a_log_file_that_cannot_be_opened_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"file/rank_0\.log"):
        configure_logging("info", rank=0, log_file=tmp_path / "file" / "rank_0.log", console=True)


def test_a_full_disk_is_said_once_and_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", rank=0, log_file=Path("/dev/full"), console=False)
    own.info("one")
    own.info("two")
    assert capsys.readouterr().err.count("No space left on device") == 1
    # Closing flushes once more what could not be written.
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            with pytest.raises(OSError, match="No space left"):
                handler.close()


def test_a_library_that_prints_by_itself_is_heard_through_our_handlers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("info", rank=0, log_file=tmp_path / "rank_0.log", console=True)
    transformers = logging.getLogger("transformers")
    transformers.addHandler(logging.StreamHandler(sys.stderr))
    transformers.propagate = False
    adopt_libraries()
    logging.getLogger("transformers.modeling_utils").warning("weights are missing")
    captured = capsys.readouterr()
    assert captured.out.count("weights are missing") == 1 and captured.err == ""


def test_once_says_a_message_once(tmp_path: Path) -> None:
    configure_logging("info", rank=0, log_file=tmp_path / "rank_0.log", console=False)
    for message in ("slow on this CPU", "slow on this CPU", "another"):
        once(own, message)
    text = (tmp_path / "rank_0.log").read_text()
    assert text.count("slow on this CPU") == 1 and text.count("another") == 1


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_for_the_user_is_one_message_with_the_traceback_in_the_file(
    tmp_path: Path, debug: bool
) -> None:
    configure_logging("info", rank=0, log_file=tmp_path / "rank_0.log", console=True)
    output = io.StringIO()
    error = _raised(ConfigError("`max_step` is unknown; did you mean `max_steps`? " + "x" * 200))
    code = report_error(error, debug=debug, console=Console(file=output, width=60))
    shown = output.getvalue()
    assert code == 2
    assert "Error: `max_step` is unknown; did you mean `max_steps`? " + "x" * 200 in shown
    assert str(tmp_path / "rank_0.log") in shown
    assert ("Traceback" in shown) is debug
    assert "Traceback" in (tmp_path / "rank_0.log").read_text()


def test_a_defect_keeps_its_traceback(tmp_path: Path) -> None:
    configure_logging("info", rank=0, log_file=tmp_path / "rank_0.log", console=True)
    output = io.StringIO()
    assert report_error(_raised(KeyError("weight")), debug=False, console=Console(file=output)) == 1
    assert "Traceback" in output.getvalue() and "Unexpected error: KeyError: 'weight'" in output.getvalue()


def test_an_error_is_shown_once_on_standard_error_before_logging_is_configured() -> None:
    program = (
        "import sys; from telemetry.log import report_error; from contract.errors import DataError\n"
        "sys.exit(report_error(DataError('no rows'), debug=False))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "Error: no rows\n")


def test_a_signal_decides_the_exit_code_and_is_no_error() -> None:
    console = Console(file=io.StringIO(), width=80)
    assert report_error(Interrupted("ended by SIGTERM", 15), debug=False, console=console) == 143
    assert isinstance(console.file, io.StringIO) and console.file.getvalue() == "ended by SIGTERM\n"
