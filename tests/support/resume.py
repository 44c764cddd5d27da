"""A plan of resuming that has to exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contract.layout import RunFolder
from trainer.checkpoint.resume import ResumePlan, plan_resume
from trainer.config.checkpoint import ResumeConfig
from trainer.parallel.process import Process


def planned(
    resume: ResumeConfig, folder: RunFolder, process: Process, config: Mapping[str, Any]
) -> ResumePlan:
    """`plan_resume`, for a folder that holds a committed step."""
    plan = plan_resume(resume, folder, process, config)
    assert plan is not None
    return plan
