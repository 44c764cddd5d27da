"""Write the reference pages in docs/ from the configuration classes. Run it after changing one."""

from __future__ import annotations

from pathlib import Path

from contract.settings.reference import reference_markdown
from launcher.rl_config import RLConfig
from trainer.config import SFTConfig

DOCS = Path(__file__).resolve().parent.parent / "docs"
CLASSES = {"configuration.md": ("sft", SFTConfig), "configuration-rl.md": ("rl", RLConfig)}


def render(page: str) -> str:
    """The text of a page by its name."""
    command, cls = CLASSES[page]
    return reference_markdown(cls, title=f"Configuration of `{command}`")


if __name__ == "__main__":
    DOCS.mkdir(exist_ok=True)
    for name in CLASSES:
        (DOCS / name).write_text(render(name), encoding="utf-8")
        print(f"wrote docs/{name}")
