"""Which plan goes on after end-to-end training: its own, or that of sequential training."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import plan_of
from tuning import job_for

from models import conv_net
from onnxcalib.algorithms.reconstruction.end_to_end import NetworkTuned
from onnxcalib.algorithms.reconstruction.layerwise import Trained
from onnxcalib.pipeline.stages import better_of


@pytest.mark.parametrize(("after", "joint_wins"), [(0.5, False), (0.2, True)])
def test_training_together_is_taken_where_it_beats_training_in_turn(after: float, joint_wins: bool) -> None:
    job = job_for(conv_net())
    plan = plan_of(job)
    together = replace(plan)
    for before in (1.0, 0.45):  # what was learned generalizes, or not
        trained = Trained(plan, plan, before, 0.4)
        taken, told, end_to_end = better_of(job, trained, NetworkTuned(together, 0.4, after))
        assert (taken is together) == joint_wins
        assert end_to_end.after == min(after, 0.4)
        assert told.after == (before if joint_wins and not trained.generalizes else 0.4)
