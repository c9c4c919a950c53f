"""What is refused with a schedule that splits backward is wrong, and what is allowed is right."""

import pytest
import split_backward
from spawn import run_ranks

pytestmark = pytest.mark.train
GOES_THROUGH = ("parameters kept", "parameters freed after forward")


def test_gradients_are_right_with_parameters_kept_and_wrong_with_parameters_freed():
    results = run_ranks(4, split_backward.compared, split_backward.SCHEDULES, GOES_THROUGH)
    for schedule in split_backward.SCHEDULES:
        kept, freed = (split_backward.together(results, schedule, setting) for setting in GOES_THROUGH)
        assert kept.right, (schedule, kept)
        assert not freed.right, f"{schedule}: torch is right now, so the rule can go"


def test_torch_raises_with_selective_checkpointing():
    found = split_backward.outcome("zbv", "selective checkpointing")
    assert "backward an extra time" in found.error, f"{found}: torch goes through now, so the rule can go"
