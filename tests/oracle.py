"""The plain way of doing what core does cleverly: no blocks, no batches, no cache, no drafts, float64 throughout.

Dense attention and a whole-sequence Llama forward, the sampler's law by direct formulae, decoding of one request by
itself, and the exact law of an acceptance rule. Nothing here calls the code under test; sizes and parameters are read
from its data classes. Slow on purpose: each function is the formula.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product

import numpy as np
from numpy.typing import NDArray

from core.model.config import ModelConfig
from core.sampling_params import SamplingParams

Doubles = NDArray[np.float64]
Floats = NDArray[np.floating]
Ints = NDArray[np.int64]
Tensors = Mapping[str, NDArray[np.floating]]


# The model


def dense_attention(query_THE: Floats, keys_CGE: Floats, values_CGE: Floats, positions_T: Ints) -> Doubles:
    """(T, H, E): every query over the whole context, with what lies behind its position masked."""
    group_size = query_THE.shape[1] // keys_CGE.shape[1]
    keys_CHE = np.repeat(keys_CGE, group_size, axis=1).astype(np.float64)
    values_CHE = np.repeat(values_CGE, group_size, axis=1).astype(np.float64)
    scores_THC = np.einsum("the,che->thc", query_THE.astype(np.float64), keys_CHE) / np.sqrt(query_THE.shape[2])
    is_future_TC = np.arange(len(keys_CHE)) > np.asarray(positions_T)[:, None]
    scores_THC = np.where(is_future_TC[:, None], -np.inf, scores_THC)
    return np.asarray(np.einsum("thc,che->the", softmax(scores_THC), values_CHE))


def llama_logits(config: ModelConfig, tensors: Tensors, token_ids: Sequence[int]) -> Doubles:
    """(T, V): logits behind each token of one sequence. Unscaled rotary embedding only."""
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return llama_hidden(config, tensors, token_ids) @ tensors[f"{head}.weight"].astype(np.float64).T


def llama_hidden(config: ModelConfig, tensors: Tensors, token_ids: Sequence[int]) -> Doubles:
    """(T, D): what comes before the head, normalised."""
    assert config.rope_scaling is None

    def weight(name: str) -> Doubles:
        return tensors[f"{name}.weight"].astype(np.float64)

    def heads(x_TD: Doubles, name: str) -> Doubles:
        return (x_TD @ weight(name).T).reshape(len(x_TD), -1, config.head_dim)

    positions_T = np.arange(len(token_ids))
    stream_TD = weight("model.embed_tokens")[list(token_ids)]
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        x_TD = _rms_norm(stream_TD, weight(f"{layer}.input_layernorm"), config.rms_norm_eps)
        attended_THE = dense_attention(
            _rotated(heads(x_TD, f"{layer}.self_attn.q_proj"), config.rope_theta),
            _rotated(heads(x_TD, f"{layer}.self_attn.k_proj"), config.rope_theta),
            heads(x_TD, f"{layer}.self_attn.v_proj"),
            positions_T,
        )
        stream_TD = stream_TD + attended_THE.reshape(len(x_TD), -1) @ weight(f"{layer}.self_attn.o_proj").T
        x_TD = _rms_norm(stream_TD, weight(f"{layer}.post_attention_layernorm"), config.rms_norm_eps)
        gate_TF, up_TF = x_TD @ weight(f"{layer}.mlp.gate_proj").T, x_TD @ weight(f"{layer}.mlp.up_proj").T
        stream_TD = stream_TD + (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ weight(f"{layer}.mlp.down_proj").T
    return _rms_norm(stream_TD, weight("model.norm"), config.rms_norm_eps)


def _rms_norm(x_TD: Doubles, weight_D: Doubles, eps: float) -> Doubles:
    return np.asarray(x_TD / np.sqrt((x_TD**2).mean(axis=-1, keepdims=True) + eps) * weight_D)


def _rotated(x_THE: Doubles, theta: float) -> Doubles:
    """Pair (i, i + E/2) at position t is turned, as a complex number, by t * theta ** (-2i / E)."""
    half = x_THE.shape[-1] // 2
    angles_TE = np.outer(np.arange(len(x_THE)), theta ** (-np.arange(half) / half))
    turned = (x_THE[..., :half] + 1j * x_THE[..., half:]) * np.exp(1j * angles_TE)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def softmax(logits: Doubles) -> Doubles:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


# The sampler


def sampling_law(
    logits_V: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_token_ids: frozenset[int] = frozenset(),
) -> Doubles:
    """(V,) the law of the token after prompt + output, token by token as the parameters are documented."""
    logits = [float(logit) for logit in logits_V]
    for token in range(len(logits)):
        if token in prompt or token in output:
            logit, penalty = logits[token], params.repetition_penalty
            logits[token] = logit / penalty if logit > 0 else logit * penalty
        if token in output:
            logits[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
        logits[token] += params.logit_bias.get(token, 0.0)
        if len(output) < params.min_tokens and token in (*eos_token_ids, *params.stop_token_ids):
            logits[token] = -np.inf
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logits[token] = -np.inf
        if any([*output, token][-len(word) :] == list(word) for word in params.bad_words):
            logits[token] = -np.inf
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.temperature == 0:
        return np.asarray(np.eye(len(logits))[ranked[0]])
    scaled = np.array(logits) / params.temperature
    kept: Sequence[int] = ranked[: params.top_k] if params.top_k > 0 else ranked
    kept = _nucleus(kept, _renormalised(scaled, kept), params.top_p)
    probs = _renormalised(scaled, kept)
    kept = [token for token in kept if probs[token] >= params.min_p * probs[kept[0]]]
    return _renormalised(scaled, kept)


def _renormalised(scaled_V: Doubles, kept: Sequence[int]) -> Doubles:
    law_V = np.zeros(len(scaled_V))
    law_V[list(kept)] = softmax(scaled_V[list(kept)])
    return law_V


def _nucleus(ranked: Sequence[int], law_V: Doubles, top_p: float) -> Sequence[int]:
    """The shortest run of the most likely tokens that together have top_p."""
    if top_p >= 1:
        return ranked
    sizes = range(1, len(ranked) + 1)
    return ranked[: next((n for n in sizes if law_V[list(ranked[:n])].sum() >= top_p), len(ranked))]


def keyed_gumbel(seed: int, choice: int, position: int, vocab_size: int) -> Doubles:
    """(V,) the noise of a position: key [seed, choice], counter [0, position, 0, 0]."""
    key, counter = np.array([seed % 2**64, choice], np.uint64), np.array([0, position, 0, 0], np.uint64)
    return -np.log(-np.log(np.random.Generator(np.random.Philox(key=key, counter=counter)).random(vocab_size)))


def decode_alone(
    logits_after: Callable[[Sequence[int]], Doubles],
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    choice: int = 0,
    eos_token_ids: frozenset[int] = frozenset(),
) -> list[int]:
    """Output of one keyed request (greedy or with a seed), a token at a time: argmax of log law + Gumbel noise."""
    output: list[int] = []
    assert params.max_tokens is not None
    while len(output) < params.max_tokens:
        tokens = [*prompt, *output]
        law_V = sampling_law(list(logits_after(tokens)), params, prompt, output, eos_token_ids)
        if params.temperature == 0:
            output.append(int(law_V.argmax()))
        else:
            assert params.seed is not None
            with np.errstate(divide="ignore"):
                noisy_V = np.log(law_V) + keyed_gumbel(params.seed, choice, len(tokens), len(law_V))
            output.append(int(noisy_V.argmax()))
        is_enough = len(output) >= params.min_tokens
        if is_enough and (
            output[-1] in params.stop_token_ids or output[-1] in eos_token_ids - _ignored(params, output)
        ):
            break
    return output


def _ignored(params: SamplingParams, output: Sequence[int]) -> frozenset[int]:
    return frozenset(output) if params.ignore_eos else frozenset()


# Acceptance. A rule takes (R, K) drafts, (R, K+1, V) target laws, (R, K, V) draft laws and (R, K+1) uniform draws, and
# returns how many drafts each row accepts and its bonus token.

Rule = Callable[[Ints, Doubles, Doubles, Doubles], tuple[NDArray[np.integer], NDArray[np.integer]]]
Laws = Callable[[tuple[int, ...]], Doubles]  # the law of the next token after these


def expected_tokens(alpha: float, num_drafts: int) -> float:
    """Tokens a step when each draft is accepted with chance alpha (Leviathan et al. 2023, equation 1)."""
    return (1 - alpha ** (num_drafts + 1)) / (1 - alpha)


def cells(breakpoints: Sequence[float] | Doubles) -> tuple[Doubles, Doubles]:
    """(midpoints, lengths) of the pieces into which breakpoints cut [0, 1): a sum over them is an exact integral."""
    inside = np.asarray(breakpoints, np.float64).ravel()
    edges = np.unique([0.0, 1.0, *inside[(inside > 0) & (inside < 1)]])
    return (edges[:-1] + edges[1:]) / 2, np.diff(edges)


def block_thresholds(drafted: Sequence[int], target_KV: Doubles, draft_KV: Doubles) -> tuple[list[float], list[float]]:
    """p_0..p_K and h_1..h_K of block verification (Sun et al. 2025), by its formulae."""
    weights, thresholds = [1.0], []
    for i, token in enumerate(drafted):
        weights.append(min(weights[-1] * target_KV[i, token] / draft_KV[i, token], 1.0))
        if i + 1 < len(drafted):
            mass = float(np.maximum(weights[-1] * target_KV[i + 1] - draft_KV[i + 1], 0).sum())
            thresholds.append(mass / (mass + 1 - weights[-1]) if mass + 1 - weights[-1] else 0.0)
        else:
            thresholds.append(weights[-1])
    return weights, thresholds


def expected_accepted(rule: Rule, target: Laws, draft: Laws, num_drafts: int) -> float:
    """The exact mean number of drafts that a step accepts."""
    total = 0.0
    for chance, drafted, target_KV, draft_KV in all_drafts(target, draft, num_drafts, ()):
        draws, weights = _product_of([*_acceptance_cells(drafted, target_KV, draft_KV), cells([])])
        num_accepted, _ = _run(rule, drafted, target_KV, draft_KV, draws)
        total += chance * float(num_accepted @ weights)
    return total


def exact_accepted(target: Laws, draft: Laws, num_drafts: int) -> tuple[Fraction, Fraction]:
    """The mean number of drafts accepted by the token rule and by block verification, as fractions, by their theory.

    Given the first i drafts, the token rule keeps all of them with chance prod min(1, P/Q), and block verification
    keeps at least i with chance p_i = min(p_{i-1} P/Q, 1) (Sun et al. 2025). No threshold and no residual comes in.
    """
    token = block = Fraction(0)
    runs = [((), Fraction(1), Fraction(1), Fraction(1))]  # drafts, their chance, and the two chances of keeping them
    for _ in range(num_drafts):
        longer = []
        for run, chance, kept, weight in runs:
            for x, (p, q) in enumerate(zip(_fractions(target(run)), _fractions(draft(run)), strict=True)):
                if q:
                    longer.append(((*run, x), chance * q, kept * min(1, p / q), min(weight * p / q, Fraction(1))))
        runs = longer
        token += sum(chance * kept for _, chance, kept, _ in runs)
        block += sum(chance * weight for _, chance, _, weight in runs)
    return token, block


def _fractions(law_V: Doubles) -> list[Fraction]:
    """The law whose floats these are: its chances are fractions with small denominators, and sum to 1."""
    exact = [Fraction(chance).limit_denominator(10**6) for chance in law_V.tolist()]
    assert 1 == sum(exact)
    return exact


def most_accepted(target: Laws, draft: Laws, num_drafts: int) -> float:
    """The mean number that no rule on one draft passes: the sum over all runs of min(target, draft)."""
    return sum(
        float(sum(min(_chance_of(target, run), _chance_of(draft, run)) for run in product(range(size), repeat=length)))
        for length in range(1, num_drafts + 1)
        for size in [len(target(()))]
    )


def _chance_of(laws: Laws, run: tuple[int, ...]) -> float:
    return float(np.prod([laws(run[:i])[token] for i, token in enumerate(run)]))


def uniform_grid(drafted: Sequence[int], target_KV: Doubles, draft_KV: Doubles) -> tuple[Doubles, Doubles]:
    """((U, K+1) draws, (U,) their weights) on which any rule with the usual thresholds is integrated exactly.

    Thresholds: the ratios of the laws at the drafted tokens, either way round; those of block verification; running
    sums of laws and residuals, plain and weighted.
    """
    residual_KV = np.maximum(target_KV[:-1] - draft_KV, 0)
    weights_K, _ = block_thresholds(drafted, target_KV, draft_KV)
    weighted_KV = np.maximum(np.array(weights_K[:-1])[:, None] * target_KV[:-1] - draft_KV, 0)
    sums_V = [law_V.cumsum() / (law_V.sum() or 1) for law_V in (*target_KV, *draft_KV, *residual_KV, *weighted_KV)]
    return _product_of([*_acceptance_cells(drafted, target_KV, draft_KV), cells(np.concatenate(sums_V))])


def _acceptance_cells(drafted: Sequence[int], target_KV: Doubles, draft_KV: Doubles) -> list[tuple[Doubles, Doubles]]:
    at_draft = (np.arange(len(drafted)), np.array(drafted, np.int64))
    _, thresholds_K = block_thresholds(drafted, target_KV, draft_KV)
    return [
        cells([t / d if d else 0, d / t if t else 0, h])
        for t, d, h in zip(target_KV[at_draft], draft_KV[at_draft], thresholds_K, strict=True)
    ]


def _product_of(axes: Sequence[tuple[Doubles, Doubles]]) -> tuple[Doubles, Doubles]:
    """((U, K+1) draws, (U,) weights) from midpoints and lengths along each axis."""
    draws = np.stack([g.ravel() for g in np.meshgrid(*(axis[0] for axis in axes), indexing="ij")], axis=1)
    weights = np.stack([g.ravel() for g in np.meshgrid(*(axis[1] for axis in axes), indexing="ij")], axis=1)
    return draws, weights.prod(axis=1)


def step_law(
    rule: Rule, target: Laws, draft: Laws, num_drafts: int, context: tuple[int, ...] = ()
) -> dict[tuple[int, ...], float]:
    """The exact law of what one speculative step emits after `context`."""
    law: dict[tuple[int, ...], float] = {}
    for chance, drafted, target_KV, draft_KV in all_drafts(target, draft, num_drafts, context):
        for emitted, weight in _emitted(rule, drafted, target_KV, draft_KV):
            law[emitted] = law.get(emitted, 0.0) + chance * weight
    return law


def all_drafts(
    target: Laws, draft: Laws, num_drafts: int, context: tuple[int, ...] = ()
) -> Iterator[tuple[float, tuple[int, ...], Doubles, Doubles]]:
    """Every draft that can come, with its chance and the laws along it."""
    vocab_size = len(target(context))
    for drafted in product(range(vocab_size), repeat=num_drafts):
        prefixes = [context + drafted[:i] for i in range(num_drafts + 1)]
        target_KV = np.stack([target(prefix) for prefix in prefixes])
        draft_KV = np.array([draft(prefix) for prefix in prefixes[:-1]]).reshape(num_drafts, vocab_size)
        chance = float(np.prod([draft_KV[i, token] for i, token in enumerate(drafted)]))
        if chance:
            yield chance, drafted, target_KV, draft_KV


def _run(
    rule: Rule, drafted: tuple[int, ...], target_KV: Doubles, draft_KV: Doubles, draws: Doubles
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """The rule on one draft, for many draws."""
    num_rows = len(draws)
    return rule(
        np.tile(np.array(drafted, np.int64), (num_rows, 1)),
        np.tile(target_KV, (num_rows, 1, 1)),
        np.tile(draft_KV, (num_rows, 1, 1)),
        draws,
    )


def _emitted(
    rule: Rule, drafted: tuple[int, ...], target_KV: Doubles, draft_KV: Doubles
) -> Iterator[tuple[tuple[int, ...], float]]:
    draws, weights = uniform_grid(drafted, target_KV, draft_KV)
    vocab_size = target_KV.shape[1]
    num_accepted, bonus = _run(rule, drafted, target_KV, draft_KV, draws)
    sums = np.bincount(num_accepted * vocab_size + bonus, weights)
    for outcome in np.flatnonzero(sums).tolist():
        num, token = divmod(outcome, vocab_size)
        yield (*drafted[:num], token), float(sums[outcome])


def law_of_sequences(target: Laws, length: int, context: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
    """The target's own law of the next `length` tokens."""
    if length == 0:
        return {(): 1.0}
    return {
        (token, *rest): float(chance) * weight
        for token, chance in enumerate(target(context))
        for rest, weight in law_of_sequences(target, length - 1, (*context, token)).items()
    }


def law_after_steps(
    rule: Rule,
    target: Laws,
    draft: Laws,
    num_drafts: int | Callable[[tuple[int, ...]], int],
    length: int,
    num_steps: int,
    context: tuple[int, ...] = (),
) -> dict[tuple[int, ...], float]:
    """The law of the first `length` tokens when `num_steps` speculative steps run and the target writes the rest.

    `num_drafts` may be a function of the tokens that are there before a step.
    """
    if num_steps == 0 or length <= 0:
        return law_of_sequences(target, max(0, length), context)
    law: dict[tuple[int, ...], float] = {}
    num = num_drafts if isinstance(num_drafts, int) else num_drafts(context)
    for emitted, chance in step_law(rule, target, draft, num, context).items():
        after, missing = (*context, *emitted), length - len(emitted)
        for rest, weight in law_after_steps(rule, target, draft, num_drafts, missing, num_steps - 1, after).items():
            tokens = (*emitted, *rest)[:length]
            law[tokens] = law.get(tokens, 0.0) + chance * weight
    return law


def keyed_agreement(target_V: Doubles, draft_V: Doubles) -> float:
    """The chance that draws from two laws by Gumbel-max with the same noise are one token.

    Token i wins both races of exponentials if its arrival is the earliest in each: 1 / sum_j max(P_j/P_i, Q_j/Q_i).
    """
    both = [i for i in range(len(target_V)) if target_V[i] > 0 and draft_V[i] > 0]
    return float(sum(1 / np.maximum(target_V / target_V[i], draft_V / draft_V[i]).sum() for i in both))


def total_variation(one: Mapping[tuple[int, ...], float], other: Mapping[tuple[int, ...], float]) -> float:
    """Half the sum of absolute differences."""
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2


# Statistics


def chi_square(counts: NDArray[np.integer], law: Doubles) -> float:
    """How much too far counts are from a law: Pearson's statistic over its limit at 1e-4, so that more than 1 fails.

    Outcomes expected fewer than 5 times are put together.
    """
    counts, expected = np.asarray(counts).ravel(), np.asarray(law).ravel() * counts.sum()
    assert not counts[expected == 0].any(), "something came that cannot"
    is_rare = expected < 5
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return float(((observed - wanted) ** 2 / wanted).sum() / chi_square_limit(max(1, len(wanted) - 1)))


def chi_square_limit(freedom: int) -> float:
    """What a chi-square variable passes with chance 1e-4 (Wilson and Hilferty 1931)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3)
