"""Simulated steps of several backwards, which accumulate gradients."""

import noria
import pytest
import torch
from noria.planning import step_simulation
from noria.planning.step_simulation import PlannedStep, PlanSpeeds
from noria.wrap import plan_elsewhere
from torch import nn


def chain():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("update", ["auto", "blocking", "backward"])
def test_backwards_that_are_left_out_take_what_simulated_ones_take(monkeypatch, device, update):
    model = chain()
    planned = plan_elsewhere(model, [torch.optim.AdamW(model.parameters())], 2**30, device=device, update=update)
    for speeds in (PlanSpeeds(1e-2, 1, 1, 1e-5), PlanSpeeds(1, 1e-2, 1, 1e-5), PlanSpeeds(1, 1, 1e-2, 1e-5)):
        short = PlannedStep(planned, 512, speeds, backwards=7)
        with monkeypatch.context() as patch:
            patch.setattr(step_simulation, "_BACKWARDS", 7)
            whole = PlannedStep(planned, 512, speeds, backwards=7)
        assert (short.num_simulated, whole.num_simulated) == (3, 7)
        assert short.step_us == pytest.approx(whole.step_us, rel=0.01)
        for name in ("forward_us", "backward_us", "forward_fetch_us", "backward_fetch_us", "drain_us", "update_us"):
            assert getattr(short.times(), name) == pytest.approx(getattr(whole.times(), name), rel=0.01), name
        for lane in ("compute", "fetch", "drain", "update"):
            (num_ops, *us), (num_of_all, *us_of_all) = short.lane_use(lane), whole.lane_use(lane)
            assert num_ops == num_of_all and us == pytest.approx(us_of_all, rel=0.01, abs=num_ops)  # rounded to us
        assert not short.check() and not whole.check()


def test_gradients_that_are_added_come_to_the_device_first():
    """All weights stay in the window between two backwards, so only held gradients are fetched there."""
    model = chain()
    planned = noria.plan(model, torch.optim.AdamW(model.parameters()), device="cpu")
    gradients, weights = (sum(getattr(unit, name) for unit in planned.units) for name in ("gradients", "weights"))
    speeds = PlanSpeeds(1, 1, 1, 1e-5)
    one, three = (PlannedStep(planned, 512, speeds, backwards=number) for number in (1, 3))
    fetched = [sum(span.bytes for span in step.spans if span.lane == "fetch") for step in (one, three)]
    assert fetched == [weights, weights + 2 * gradients]
    assert three.step_us > one.step_us
