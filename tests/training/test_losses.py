"""Units, denominators and terms of the objective, worked out by hand."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, PolicyLossConfig

import support.verl_trainer_imports  # noqa: F401
from agl_fast.training.losses import policy_losses
from agl_fast.training.losses.policy import PolicyObjective
from agl_fast.training.losses.units import token_weights
from agl_fast.training.losses.value import ValueObjective

# Rollout A: calls 0 and 1 in one row, call 2 in another. Rollout B: call 0. Then a filler.
TRAINED = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
CALLS = torch.tensor([[0, 0, -1, 1], [2, 2, 2, -1], [0, 0, -1, -1], [-1, -1, -1, -1]])
OWNERS = ["A", "A", "B", "B"]
ALL = [np.arange(4)]


def weights(aggregation: Any, mini_batches: Any = ALL, **options: Any) -> list[list[float]]:
    found = token_weights(
        aggregation,
        TRAINED,
        mini_batches,
        call_index=CALLS,
        rollout_of_row=OWNERS,
        **options,
    )
    assert not found[TRAINED == 0].any()
    return [row[mask != 0].tolist() for row, mask in zip(found, TRAINED, strict=True)][:3]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [[1 / 8] * 3, [1 / 8] * 3, [1 / 8] * 2]),
        ("token-sum", [[1.0] * 3, [1.0] * 3, [1.0] * 2]),
        ("seq-mean-token-sum", [[1 / 4] * 3, [1 / 4] * 3, [1 / 4] * 2]),
        ("seq-mean-token-mean", [[1 / 8, 1 / 8, 1 / 4], [1 / 12] * 3, [1 / 8] * 2]),
        ("rollout-mean", [[1 / 12] * 3, [1 / 12] * 3, [1 / 4] * 2]),
    ],
)
def test_a_mini_batch_counts_its_own_units(aggregation, expected):
    for found, row in zip(weights(aggregation), expected, strict=True):
        assert found == pytest.approx(row, rel=1e-15)


def test_the_scale_factor_is_what_is_configured():
    found = weights("seq-mean-token-sum-norm", scale_factor=50)
    assert found == [[pytest.approx(1 / 200)] * n for n in (3, 3, 2)]


def test_units_of_one_mini_batch_do_not_count_in_another():
    found = weights("seq-mean-token-sum", [np.array([0, 1]), np.array([2])])
    assert found == [[pytest.approx(1 / 3)] * 3, [pytest.approx(1 / 3)] * 3, [1.0, 1.0]]
    left_out = weights("token-mean", [np.array([0, 1])])
    assert left_out == [[pytest.approx(1 / 6)] * 3, [pytest.approx(1 / 6)] * 3, [0.0, 0.0]]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "rollout-mean"])
def test_a_mini_batch_without_a_trained_token_weighs_nothing(aggregation):
    found = token_weights(aggregation, TRAINED * 0, ALL, call_index=CALLS, rollout_of_row=OWNERS)
    assert not found.any()


def test_calls_have_to_be_told_apart_where_they_are_the_unit():
    with pytest.raises(ValueError, match="call_index=True"):
        token_weights("seq-mean-token-sum", TRAINED, ALL, call_index=None, rollout_of_row=OWNERS)
    with pytest.raises(ValueError, match="loss_agg_mode='mean'"):
        token_weights("mean", TRAINED, ALL, call_index=CALLS, rollout_of_row=OWNERS)  # type: ignore[arg-type]


def actor(loss_mode: str, **settings: Any) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode, dro_beta=0.5),
        **settings,
    )


def micro_batch(aggregation: Any, *, n_ranks: int = 1, **further: torch.Tensor) -> Any:
    """Four rows of one prompt token and four response tokens each."""
    torch.manual_seed(0)
    found = token_weights(
        aggregation,
        TRAINED,
        ALL,
        call_index=CALLS,
        rollout_of_row=OWNERS,
    )
    tensors = {
        "prompts": torch.zeros(4, 1, dtype=torch.int64),
        "responses": torch.zeros(4, 4, dtype=torch.int64),
        "attention_mask": torch.ones(4, 5, dtype=torch.int64),
        "response_mask": TRAINED,
        "call_index": CALLS,
        "loss_weights": found,
        "old_log_probs": -torch.rand(4, 4, dtype=torch.float64),
        "advantages": torch.randn(4, 4, dtype=torch.float64),
        **further,
    }
    return tu.get_tensordict(tensors, {"dp_size": n_ranks, "batch_num_tokens": 8})


def nested(padded: torch.Tensor) -> torch.Tensor:
    """(4, 4) response values as a model gives them: at the token before, with one for the end."""
    rows = [torch.cat([row, row.new_zeros(1)]) for row in padded]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def log_probs(seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    return (-torch.rand(4, 4, dtype=torch.float64)).requires_grad_()


def of_tokens(name: str, ratio: Any, new: Any, old: Any, advantage: Any) -> Any:
    """A token's loss, from the papers, with verl's default clipping to 0.2 and 3."""
    clipped = ratio.clamp(0.8, 1.2)
    if name == "vanilla":
        loss = torch.maximum(-advantage * ratio, -advantage * clipped)
        return torch.where(advantage < 0, torch.minimum(loss, -3 * advantage), loss)
    if name == "cispo":
        return -clipped.detach() * advantage * new
    if name == "gpg":
        return -advantage * new
    if name == "dro":
        return -(new * advantage - 0.25 * (new - old) ** 2)
    tau = torch.where(advantage > 0, 1.0, 1.05).double().round(decimals=2)
    return -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau  # sapo


@pytest.mark.parametrize("name", ["vanilla", "cispo", "gpg", "dro", "sapo"])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_losses_of_tokens(name, n_ranks):
    data = micro_batch("seq-mean-token-mean", n_ranks=n_ranks)
    new, old = log_probs(), data["old_log_probs"]
    loss, metrics = PolicyObjective(actor(name))({"log_probs": nested(new)}, data)
    of_token = of_tokens(name, (new - old).exp(), new, old, data["advantages"])
    expected = n_ranks * (of_token * data["loss_weights"]).sum()
    # verl's sapo divides by 1 + 1e-8.
    assert loss.item() == pytest.approx(expected.item(), rel=2e-8)
    assert metrics["actor/pg_loss"].values == [loss.item()]
    gradient, written_out = (torch.autograd.grad(each, new)[0] for each in (loss, expected))
    assert torch.allclose(gradient, written_out, rtol=2e-8, atol=0)
    assert not gradient[TRAINED == 0].any()


def calls_of(values: torch.Tensor) -> list[torch.Tensor]:
    return [values[0, :2], values[0, 3:], values[1, :3], values[2, :2]]


def test_gspo_looks_at_calls():
    data = micro_batch("seq-mean-token-mean")
    new = log_probs()
    loss, _ = PolicyObjective(actor("gspo"))({"log_probs": nested(new)}, data)
    expected = 0.0
    ratios, advantages = calls_of(new - data["old_log_probs"]), calls_of(data["advantages"])
    for ratio, advantage in zip(ratios, advantages, strict=True):
        of_call = ratio.mean().exp()
        of_token = torch.maximum(-advantage * of_call, -advantage * of_call.clamp(0.8, 1.2))
        expected += of_token.mean() / 4
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_geo_mean_looks_at_calls():
    data = micro_batch("seq-mean-token-mean", n_ranks=2)
    new = log_probs()
    loss, _ = PolicyObjective(actor("geo_mean"))({"log_probs": nested(new)}, data)
    expected = 0.0
    ratios, advantages = calls_of(new - data["old_log_probs"]), calls_of(data["advantages"])
    for ratio, advantage in zip(ratios, advantages, strict=True):
        sign = advantage.sign()
        least = sign * torch.minimum(sign * ratio, sign * ratio.clamp(-0.2, 0.2))
        expected += 2 * -advantage.mean() * least.mean().exp() / 4
    assert loss.item() == pytest.approx(expected.item(), rel=1e-7)  # verl's 1e-8 in its means


def test_kl_and_entropy_terms_have_the_weights_of_the_policy_term():
    data = micro_batch("rollout-mean", ref_log_prob=-torch.rand(4, 4, dtype=torch.float64))
    new, entropy = log_probs(), torch.rand(4, 4, dtype=torch.float64)
    config = actor(
        "per_rollout_mean",
        entropy_coeff=0.3,
        use_kl_loss=True,
        kl_loss_coef=0.7,
        kl_loss_type="k2",
    )
    output = {"log_probs": nested(new), "entropy": nested(entropy)}
    loss, metrics = PolicyObjective(config)(output, data)
    kl = 0.5 * (new - data["ref_log_prob"]) ** 2
    old = data["old_log_probs"]
    policy = of_tokens("vanilla", (new - old).exp(), new, old, data["advantages"])
    expected = ((policy - 0.3 * entropy + 0.7 * kl) * data["loss_weights"]).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for name, values in (("actor/entropy_loss", entropy), ("kl_loss", kl)):
        of_rollouts = (values * data["loss_weights"]).sum().item()
        assert metrics[name].aggregate() == pytest.approx(of_rollouts)


def test_importance_weights_multiply_the_policy_term_alone():
    importance = 1 + torch.rand(4, 4, dtype=torch.float64)
    data = micro_batch("token-mean", rollout_is_weights=importance)
    new = log_probs()
    loss, _ = PolicyObjective(actor("gpg"))({"log_probs": nested(new)}, data)
    expected = -(new * data["advantages"] * importance * data["loss_weights"]).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_micro_batch_of_fillers_takes_part_with_nothing():
    data = micro_batch("token-mean")
    for name in ("response_mask", "loss_weights"):
        data[name] = data[name] * 0
    new = log_probs()
    for name in ("vanilla", "geo_mean", "gspo"):
        loss, metrics = PolicyObjective(actor(name))({"log_probs": nested(new)}, data)
        loss.backward()
        assert loss.item() == 0
        assert not new.grad.any()
        assert all(value.aggregate() == 0 for value in metrics.values())
        assert "actor/pg_clipfrac" in metrics


def test_metrics_are_means_over_the_tokens_of_the_mini_batch():
    whole, ranks = micro_batch("token-mean"), 2
    new = log_probs()
    _, expected = PolicyObjective(actor("vanilla"))({"log_probs": nested(new)}, whole)
    shares = []
    for rows in ([0, 3, 3, 3], [1, 2, 3, 3]):
        share = micro_batch("token-mean", n_ranks=ranks)
        for name in ("response_mask", "loss_weights", "old_log_probs", "advantages"):
            share[name] = share[name][rows]
        shares.append(PolicyObjective(actor("vanilla"))({"log_probs": nested(new[rows])}, share))
    for name, value in expected.items():
        found = sum(metrics[name].aggregate() for _, metrics in shares) / ranks
        assert found == pytest.approx(value.aggregate()), name


def test_a_loss_of_ones_own_gets_calls_as_rows():
    @register_policy_loss("longest_call")
    def longest_call(response_mask: Any, rollout_is_weights: Any, **_: Any) -> Any:
        assert rollout_is_weights.shape == response_mask.shape == (4, 3)
        return rollout_is_weights.sum(), {}

    try:
        objective = pickle.loads(pickle.dumps(PolicyObjective(actor("longest_call"))))
        loss, _ = objective({"log_probs": nested(log_probs())}, micro_batch("token-mean"))
        assert loss.item() == pytest.approx(1)
    finally:
        del POLICY_LOSS_REGISTRY["longest_call"]


def test_a_worker_without_the_policy_loss_says_so():
    sent = pickle.dumps(PolicyObjective(actor("unheard_of")))
    with pytest.raises(ValueError, match=r"'unheard_of' is not registered.*external_lib"):
        pickle.loads(sent)
    pickle.loads(pickle.dumps(PolicyObjective(actor("cispo_per_rollout_mean"))))


def test_every_policy_loss_of_verl_works_or_is_refused():
    per_call = {"gspo", "geo_mean"}
    known = {*policy_losses.OF_TOKENS, *per_call, *policy_losses.REFUSED}
    assert set(POLICY_LOSS_REGISTRY) == known
    for name in POLICY_LOSS_REGISTRY:
        if name in policy_losses.REFUSED:
            with pytest.raises(ValueError, match=f"loss_mode='{name}': "):
                policy_losses.require_supported(actor(name))
        else:
            policy_losses.require_supported(actor(name))
    without_beta = SimpleNamespace(policy_loss={"loss_mode": "dro"})
    with pytest.raises(ValueError, match="dro_beta=None"):
        policy_losses.require_supported(without_beta)


def test_the_critics_loss():
    data = micro_batch("token-mean")
    before, returns = log_probs(3).detach(), log_probs(4).detach()
    data["values"], data["returns"] = before, returns
    predicted = log_probs(5)
    objective = ValueObjective(0.2)
    loss, metrics = objective({"values": nested(predicted)}, data)
    errors = []
    for row, column in TRAINED.nonzero().tolist():
        v, old, target = (x[row, column].item() for x in (predicted, before, returns))
        clipped = min(max(v, old - 0.2), old + 0.2)
        errors.append(max((v - target) ** 2, (clipped - target) ** 2))
    assert loss.item() == pytest.approx(math.fsum(errors) / 8 / 2, rel=1e-12)
    assert metrics["critic/vf_loss"].aggregate() == loss.item()
    mean = predicted[TRAINED != 0].mean().item()
    assert metrics["critic/vpred_mean"].aggregate() == pytest.approx(mean)
