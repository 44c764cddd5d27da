"""Write docs/configuration.md from the configuration classes. Run it after changing one."""

from __future__ import annotations

from pathlib import Path

from contract.settings.reference import reference_markdown
from trainer.config import SFTConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"


def render() -> str:
    """The page's text."""
    return reference_markdown(SFTConfig, title="Configuration of `sft`")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
