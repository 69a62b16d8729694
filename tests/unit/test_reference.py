"""The slow reference against transformers' model, torch's optimizer and clipping, and sums by definition."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.reference import plain
from tests.reference.decoder import Architecture, forward, load, logits_of, values_of

VOCAB, EXPERTS, TOPK, LAYERS = 50, 6, 2, 3


class DoubleTorch:
    """`torch` as the model's file sees it, with every float32 cast turned into float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model whose middle layer is dense, in float64, and what it writes to disk."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3_moe, "torch", DoubleTorch())
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config).double().eval()
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = 0.4 * noise + (1.0 if parameter.ndim == 1 else 0.0)
        folder = tmp_path_factory.mktemp("checkpoint")
        model.save_pretrained(folder)
        arch = Architecture.from_hf(json.loads((folder / "config.json").read_text()))
        yield SimpleNamespace(model=model, arch=arch, weights=load(load_file(folder / "model.safetensors")))


@pytest.fixture
def tokens():
    return torch.randint(0, VOCAB, (11,), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def episodes(tokens):
    """Two turns with an observation between them, truncated; one decision, terminated; no decision."""
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0], dtype=torch.bool)
    turns = torch.tensor([-1, -1, 0, 0, 0, -1, -1, 1, 1, -1, -1])
    behaviour = torch.linspace(-5.0, -3.0, 11, dtype=torch.float64)
    long = plain.Episode(tokens, mask, turns, behaviour, [0.5, -0.25], 1.0, True, torch.tensor([3, 4]))
    one = plain.Episode(tokens[:4], torch.tensor([0, 0, 1, 0]).bool(), turns[:4], behaviour[:4], [0.0], -1.0)
    none = plain.Episode(tokens[:3], torch.zeros(3, dtype=torch.bool), turns[:3], behaviour[:3], [], 0.0)
    return [long, one, none]


def hf_run(model, tokens, replayed=None):
    """Logits [N, V], expert ids [L, N, k], router logits [L, N, E] of transformers; its top-k may be `replayed`."""
    seen, original = [], modeling_qwen3_moe.Qwen3MoeTopKRouter.forward

    def topk(probabilities, k, dim):
        ids = torch.topk(probabilities, k, dim=dim).indices if replayed is None else replayed[len(seen)]
        return probabilities.gather(-1, ids), ids

    def recording(self, hidden_states):
        outputs = original(self, hidden_states)
        seen.append((outputs[2], outputs[0]))
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3_moe.torch, "topk", topk, raising=False)
        patch.setattr(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", recording)
        logits = model(input_ids=tokens[None]).logits[0]
    return logits, *(torch.stack(column) for column in zip(*seen, strict=True))


def assert_close(found, expected, tolerance=1e-10):
    assert found.dtype == torch.float64
    worst, size = (found - expected).detach().abs().max(), expected.detach().abs().max()
    assert float(worst) <= tolerance * max(1.0, float(size))


def test_forward_and_routes_equal_transformers(checkpoint, tokens):
    logits, routes, _ = hf_run(checkpoint.model, tokens)
    run = forward(checkpoint.arch, checkpoint.weights, tokens)
    assert checkpoint.arch.moe_layers == (0, 2)
    assert_close(logits_of(checkpoint.weights, run.hidden), logits)
    assert torch.equal(run.routes, routes) and torch.equal(run.native, routes)


def test_gradients_equal_transformers(checkpoint, tokens):
    logits, *_ = hf_run(checkpoint.model, tokens)
    checkpoint.model.zero_grad()
    logits.logsumexp(-1).sum().backward()
    own = logits_of(checkpoint.weights, forward(checkpoint.arch, checkpoint.weights, tokens).hidden)
    gradients = plain.gradients_of(own.logsumexp(-1).sum(), checkpoint.weights)
    for layer in checkpoint.arch.moe_layers:
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert_close(gradients[name], checkpoint.model.get_parameter(name).grad)
        fused = checkpoint.model.get_parameter(f"model.layers.{layer}.mlp.experts.down_proj").grad
        for expert in range(EXPERTS):
            assert_close(gradients[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"], fused[expert])
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_norm.weight", "lm_head.weight"):
        assert_close(gradients[name], checkpoint.model.get_parameter(name).grad)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_replayed_routes_equal_transformers_with_the_same_ids(checkpoint, tokens, norm_topk_prob, monkeypatch):
    for module in checkpoint.model.modules():
        if isinstance(module, modeling_qwen3_moe.Qwen3MoeTopKRouter):
            monkeypatch.setattr(module, "norm_topk_prob", norm_topk_prob)
    arch = replace(checkpoint.arch, norm_topk_prob=norm_topk_prob)
    scores = torch.rand(2, len(tokens), EXPERTS, generator=torch.Generator().manual_seed(3))
    other = scores.topk(TOPK).indices
    logits, used, _ = hf_run(checkpoint.model, tokens, replayed=other)
    run = forward(arch, checkpoint.weights, tokens, other)
    assert_close(logits_of(checkpoint.weights, run.hidden), logits)
    assert torch.equal(run.routes, used) and torch.equal(used, other)
    assert not torch.equal(run.native, other)


def test_missing_and_absent_rows_route_natively(checkpoint, tokens):
    native = forward(checkpoint.arch, checkpoint.weights, tokens)
    recorded = native.routes[:, :-1].clone()
    recorded[0, 4] = -1
    again = forward(checkpoint.arch, checkpoint.weights, tokens, recorded)
    assert torch.equal(again.routes, native.routes) and torch.equal(again.hidden, native.hidden)
    recorded[0, 4] = (recorded[0, 3] + 1) % EXPERTS
    assert not torch.equal(forward(checkpoint.arch, checkpoint.weights, tokens, recorded).hidden, native.hidden)


def test_margins_are_the_gap_between_the_last_chosen_and_the_first_left_out(checkpoint, tokens):
    ranked = hf_run(checkpoint.model, tokens)[2].sort(-1, descending=True).values
    run = forward(checkpoint.arch, checkpoint.weights, tokens)
    assert_close(run.margins, ranked[..., TOPK - 1] - ranked[..., TOPK])
    everyone = forward(replace(checkpoint.arch, topk=EXPERTS), checkpoint.weights, tokens)
    assert torch.isinf(everyone.margins).all()


def test_logprobs_are_read_one_token_earlier_at_temperature(checkpoint, episodes):
    episode = episodes[0]
    logprobs, entropies = plain.read_policy(checkpoint.arch, checkpoint.weights, episode, temperature=0.7)
    logits, *_ = hf_run(checkpoint.model, episode.tokens)
    states = torch.distributions.Categorical(logits=(logits / 0.7)[[1, 2, 3, 6, 7]])
    assert_close(logprobs, states.log_prob(episode.tokens[[2, 3, 4, 7, 8]]))
    assert_close(entropies, states.entropy())


def critic_of(checkpoint):
    weights = {name: tensor for name, tensor in checkpoint.weights.items() if name != "lm_head.weight"}
    return weights | {"score.weight": torch.linspace(-1, 1, 16, dtype=torch.float64)[None].requires_grad_()}


def test_values_are_read_one_token_earlier_and_bootstrap_after_the_boundary(checkpoint, episodes):
    critic, (long, one, _) = critic_of(checkpoint), episodes
    seen = torch.cat([long.tokens, torch.tensor([3, 4])])
    hidden = checkpoint.model.model(input_ids=seen[None]).last_hidden_state[0]
    by_hf = hidden @ critic["score.weight"][0]
    values, successor = plain.read_values(checkpoint.arch, critic, long)
    assert_close(values, by_hf[[1, 2, 3, 6, 7]])
    assert_close(successor, by_hf[12])
    assert float(plain.read_values(checkpoint.arch, critic, one)[1]) == 0.0
    assert_close(values_of(critic, forward(checkpoint.arch, critic, long.tokens).hidden)[[1, 2]], values[:2])


def test_gae_is_the_discounted_sum_of_errors():
    rewards, values, successor, gamma, lam = [0.1, -0.2, 0.7], [0.3, 0.5, -0.4], 0.9, 0.97, 0.8
    following = [*values[1:], successor]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    expected = [sum((gamma * lam) ** (i - j) * deltas[i] for i in range(j, 3)) for j in range(3)]
    assert plain.gae(rewards, values, successor, gamma, lam) == pytest.approx(expected, rel=1e-12)


def test_rewards_fall_on_the_last_decision_of_their_turn(episodes):
    assert [plain.place_rewards(episode) for episode in episodes] == [[0, 0, 0.5, 0, 0.75], [-1.0], []]


def scored(**fields):
    blank = dict.fromkeys(("behaviour", "anchor", "values", "advantages", "returns"), [0.0])
    columns = {name: torch.tensor(column, dtype=torch.float64) for name, column in (blank | fields).items()}
    return plain.Scored(reference=None, **columns)


def test_policy_losses_branch_by_branch():
    """Ratios 2 and 1/2 with either sign of the advantage; the caps 1.3 and 0.8; 3 times for dual clip."""
    logprobs = torch.tensor([2.0, 2.0, 0.5, 0.5, 4.0], dtype=torch.float64).log()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    objective = plain.Objective(clip_low=0.2, clip_high=0.3)
    zero = torch.zeros(5, dtype=torch.float64)
    assert_close(
        plain.ppo_loss(logprobs, zero, advantages, objective), torch.tensor([-1.3, 2, -0.5, 0.8, 4]).double(), 1e-7
    )
    capped = plain.ppo_loss(logprobs, zero, advantages, replace(objective, dual_clip=3.0))
    assert capped.tolist() == pytest.approx([-1.3, 2, -0.5, 0.8, 3])


def test_decoupled_loss_is_ppo_on_policy_data_and_caps_the_ratio_off_it():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    same = scored(behaviour=[-1.2, -1.1], anchor=[-1.2, -1.1], advantages=[1.0, -1.0])
    objective = plain.Objective()
    assert_close(
        plain.decoupled_loss(logprobs, same, objective),
        plain.ppo_loss(logprobs, same.anchor, same.advantages, objective),
    )
    far = scored(behaviour=[-30.0, -30.0], anchor=[-1.0, -2.0], advantages=[-1.0, -1.0])
    assert plain.decoupled_loss(logprobs, far, objective).tolist() == pytest.approx([100.0, 100.0])
    log2, apart = math.log(2), scored(behaviour=[-math.log(2)], advantages=[1.0])
    clipped = plain.decoupled_loss(torch.tensor([log2]).double(), apart, objective)
    assert clipped.tolist() == pytest.approx([-1.2 * 2])  # π_θ/π̄ = 2 clipped to 1.2, times π̄/μ = 2


def test_value_loss_takes_the_larger_of_clipped_and_unclipped():
    values, s = torch.tensor([1.0, 0.1]).double(), scored(values=[0.0, 0.0], returns=[1.0, 1.0])
    assert plain.value_loss(values, s, None).tolist() == pytest.approx([0.0, 0.405])
    assert plain.value_loss(values, s, 0.2).tolist() == pytest.approx([0.32, 0.405])


def test_importance_weights_truncate_tokens_or_sequences():
    empty = scored(anchor=[], behaviour=[])
    batch = [scored(anchor=[math.log(3.0), math.log(0.5)], behaviour=[0.0, 0.0]), empty, scored(anchor=[-1.0])]
    token = plain.importance_weights(batch, plain.Objective(token_is_cap=2.0))
    assert torch.cat(token).tolist() == pytest.approx([2.0, 0.5, math.exp(-1)])
    sequence = plain.importance_weights(batch, plain.Objective(sequence_is_cap=1.2))
    assert torch.cat(sequence).tolist() == pytest.approx([1.2, 1.2, math.exp(-1)])
    normal = plain.importance_weights(batch, plain.Objective(sequence_is_cap=1.2, sequence_is_normalise=True))
    mean = (1.2 + math.exp(-1)) / 2
    assert torch.cat(normal).tolist() == pytest.approx([1.2 / mean, 1.2 / mean, math.exp(-1) / mean])


def test_loss_weights_count_only_sequences_with_decisions():
    assert plain.loss_weight([3, 0, 1], 3, "token_mean") == 1 / 4
    assert plain.loss_weight([3, 0, 1], 3, "sequence_mean") == 1 / 6


def test_first_step_gradient_is_the_policy_gradient(checkpoint, episodes):
    """At ratio 1 the clipped objective's gradient is that of minus the mean of advantage times log-prob."""
    objective = plain.Objective(whiten=True)
    arch, actor, critic = checkpoint.arch, checkpoint.weights, critic_of(checkpoint)
    frozen = plain.score(arch, critic, episodes, objective, anchor=actor)
    advantages = torch.cat([s.advantages for s in frozen])
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-12)
    assert float(advantages.std(correction=0)) == pytest.approx(1)
    found = plain.gradients_of(plain.actor_loss(arch, actor, episodes, frozen, objective), actor)
    logprobs = torch.cat([plain.read_policy(arch, actor, episode, 1.0)[0] for episode in episodes])
    expected = plain.gradients_of(-(advantages * logprobs).mean(), actor)
    for name in ("lm_head.weight", "model.layers.0.mlp.gate.weight"):
        assert_close(found[name], expected[name])


def test_kl_and_entropy_gradients(checkpoint, episodes):
    """With rewards and values of zero only KL and entropy are left, each the mean over decisions."""
    arch, actor = checkpoint.arch, checkpoint.weights
    critic = critic_of(checkpoint) | {"score.weight": torch.zeros(1, 16, dtype=torch.float64)}
    still = [replace(episode, reward=0.0, turn_rewards=[0.0, 0.0]) for episode in episodes]
    reference = {name: (1.1 * tensor).detach() for name, tensor in actor.items()}
    objective = plain.Objective(kl_coef=0.3, entropy_coef=0.2)
    frozen = plain.score(arch, critic, still, objective, anchor=actor, reference=reference)
    found = plain.actor_loss(arch, actor, still, frozen, objective)
    read = [plain.read_policy(arch, actor, episode, 1.0) for episode in still]
    logprobs, entropies = (torch.cat(column) for column in zip(*read, strict=True))
    behaviour = torch.cat([episode.behaviour[episode.decisions] for episode in still])
    other = torch.cat([plain.read_policy(arch, reference, episode, 1.0)[0] for episode in still])
    quotient = (other - logprobs).exp()
    kl = (logprobs - behaviour).exp() * (quotient - 1 - quotient.log())
    assert_close(found, (0.3 * kl - 0.2 * entropies).mean())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_torch(weight_decay):
    torch.manual_seed(0)
    theirs = {name: torch.randn(4, 3, dtype=torch.float64).requires_grad_() for name in "ab"}
    own, state = load(theirs), plain.AdamState()
    settings = plain.AdamW(lr=0.03, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=weight_decay)
    optimizer = torch.optim.AdamW(theirs.values(), lr=0.03, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay)
    for _ in range(5):
        gradients = {name: torch.randn(4, 3, dtype=torch.float64) for name in "ab"}
        for name, tensor in theirs.items():
            tensor.grad = gradients[name].clone()
        optimizer.step()
        own = plain.adamw(own, gradients, state, settings)
    for name in "ab":
        assert_close(own[name].detach(), theirs[name].detach(), 1e-14)


def test_undecayed_weights_do_not_decay():
    weights = {name: torch.ones(2, dtype=torch.float64) for name in "ab"}
    still = {name: torch.zeros(2, dtype=torch.float64) for name in "ab"}
    settings = plain.AdamW(lr=0.1, weight_decay=0.5, undecayed=frozenset("b"))
    after = plain.adamw(weights, still, plain.AdamState(), settings)
    assert after["a"].tolist() == pytest.approx([0.95, 0.95]) and after["b"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_equals_torch(max_norm):
    torch.manual_seed(0)
    parameters = [torch.zeros(4, 3, dtype=torch.float64).requires_grad_() for _ in range(2)]
    gradients = {name: torch.randn(4, 3, dtype=torch.float64) for name in "ab"}
    for parameter, gradient in zip(parameters, gradients.values(), strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    clipped, norm = plain.clip(gradients, max_norm)
    assert norm == pytest.approx(float(expected), rel=1e-12)
    for parameter, gradient in zip(parameters, clipped.values(), strict=True):
        assert_close(gradient, parameter.grad)


def test_ewma_is_the_normalised_weighted_sum_of_past_weights():
    thetas = [torch.tensor([float(value)], dtype=torch.float64) for value in (3, -1, 4, 1)]
    z, average = 1.0, {"a": thetas[0]}
    for theta in thetas[1:]:
        z, average = plain.ewma(z, average, {"a": theta}, decay=0.8)
    powers = [0.8 ** (3 - n) for n in range(4)]
    assert z == pytest.approx(sum(powers))
    expected = sum(p * float(theta) for p, theta in zip(powers, thetas, strict=True)) / sum(powers)
    assert float(average["a"]) == pytest.approx(expected)


def test_a_step_lowers_both_losses_and_an_empty_batch_takes_none(checkpoint, episodes):
    arch, actor, critic = checkpoint.arch, checkpoint.weights, critic_of(checkpoint)
    objective, settings = plain.Objective(), plain.AdamW(lr=1e-4, max_norm=1.0)
    states = (plain.AdamState(), plain.AdamState())
    run = (objective, (settings, settings), states)
    empty = plain.ppo_step(arch, actor, critic, episodes[2:], *run, anchor=actor)
    assert empty is None and (states[0].step, states[1].step) == (0, 0)
    policy, value = plain.ppo_step(arch, actor, critic, episodes, *run, anchor=actor)
    frozen = plain.score(arch, critic, episodes, objective, anchor=actor)
    assert plain.actor_loss(arch, policy.weights, episodes, frozen, objective).item() < policy.loss
    assert plain.critic_loss(arch, value.weights, episodes, frozen, objective).item() < value.loss
    assert policy.norm > 0 and value.norm > 0 and (states[0].step, states[1].step) == (1, 1)
