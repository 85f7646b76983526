"""One replica in one process: equal to Hugging Face on flattened paths, exact with weights, safe with nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.types import Layout
from tests.dist.replica_world import (
    CLIP_HIGH,
    CLIP_LOW,
    build_replica,
    compute_reference_logprobs,
    find_gap,
    make_tree_row,
    run_world,
    to_numpy,
    with_behavior,
)

pytestmark = pytest.mark.timeout(400)


def write_model(folder: Path, kind: str, *, tied: bool, vocab_size: int = 96) -> Path:
    """A random model of the family, with norms and biases that are not constant."""
    import torch
    import transformers

    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
    }
    if kind == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    elif kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(head_dim=16, **experts, **sizes))
    else:
        model = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(head_dim=16, rope_parameters={"rope_theta": 1e6}, **sizes)
        )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale, base = (0.1, parameter) if parameter.dim() == 1 else (0.2, torch.zeros_like(parameter))
            parameter.copy_(base + scale * torch.randn(parameter.shape, generator=generator))
    model.float().save_pretrained(folder)
    return folder


def split_experts(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names of a checkpoint: transformers stacks the experts of a layer only in memory."""
    found: dict[str, np.ndarray] = {}
    for name, value in named.items():
        head, is_stacked, part = name.partition("experts.")
        if not is_stacked:
            found[name] = value
        for index, one in enumerate(value if is_stacked else ()):
            halves = dict(zip(("gate_proj", "up_proj"), np.split(one, 2), strict=True))
            parts = halves if part == "gate_up_proj" else {"down_proj": one}
            found |= {f"{head}experts.{index}.{key}.weight": half for key, half in parts.items()}
    return found


def compare_with_hugging_face(rank: int, world: Path, kind: str, tied: bool) -> dict[str, float]:
    import torch
    import transformers

    from gyre.algo.objective import ObjectiveSettings, Targets, weigh

    path = write_model(world / "model", kind, tied=tied)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    replica = build_replica(path, 1, Layout())
    rows = [make_tree_row(seed, 96, num_turns=seed + 1) for seed in range(5)]
    expected = compute_reference_logprobs(reference, rows)
    ours = replica.logprobs(rows)
    gap = max(float(np.abs(a - b.detach().numpy()).max()) for a, b in zip(ours, expected, strict=True))
    # The third rollout is far off policy and its advantage positive: it is clipped and must add nothing.
    rows = [with_behavior(row, b.detach().numpy(), shift=0.3 * (i == 2)) for i, (row, b) in enumerate(
        zip(rows, expected, strict=True))]  # fmt: skip
    rows[2] = replace(rows[2], advantage=1.0)
    objective = ObjectiveSettings(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    stats = replica.micro_step(rows, objective)
    loss = torch.zeros(())
    for row, logprobs in zip(rows, expected, strict=True):
        now = logprobs.detach().double().numpy()
        choice = weigh(Targets(logprobs=now, behavior=row.behavior_logprobs, advantage=row.advantage), objective)
        loss = loss + (torch.tensor(choice.weights, dtype=torch.float32) * logprobs).sum()
    loss.backward()
    expected_gradient = split_experts(
        {n: p.grad.numpy() for n, p in reference.named_parameters() if p.grad is not None}
    )
    return {
        "logprob_gap": gap,
        "gradient_gap": find_gap(to_numpy(replica.export_gradients()), expected_gradient),
        "clipped": stats.clipped,
        "num_targets": stats.num_targets - sum(row.num_targets for row in rows),
        "entropy": stats.entropy,
        "is_round_trip": is_round_trip(path, world / "again", dict(replica.export_hf())),
    }


def is_round_trip(path: Path, again: Path, exported: dict[str, Any]) -> bool:
    """Whether what is exported is bitwise what was read, and transformers reads it back the same."""
    import json

    import torch
    import transformers

    from gyre.train.folder import read_hf_tensors, write_hf_folder

    given = read_hf_tensors(path)
    write_hf_folder(again, json.loads((path / "config.json").read_text()), exported)
    one = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    other = transformers.AutoModelForCausalLM.from_pretrained(again, dtype=torch.float32).state_dict()
    return given.keys() == exported.keys() and all(
        torch.equal(tensor, exported[name]) for name, tensor in given.items()
    ) and all(torch.equal(tensor, other[name]) for name, tensor in one.items())  # fmt: skip


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("qwen3", True), ("qwen2", False), ("qwen3_moe", False)])
def test_trees_give_the_logprobs_and_gradient_of_hugging_face_on_flattened_paths(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    (found,) = run_world(1, tmp_path, compare_with_hugging_face, kind, tied)
    assert found["logprob_gap"] < 2e-5
    assert found["gradient_gap"] < 1e-5
    assert (found["clipped"], found["num_targets"], found["is_round_trip"]) == (1, 0, True)
    assert 0.0 < found["entropy"] < np.log(96)


def try_edge_cases(rank: int, world: Path) -> dict[str, object]:
    import torch

    from gyre.algo.objective import ObjectiveSettings
    from gyre.errors import RunError

    objective = ObjectiveSettings(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    path = write_model(world / "model", "qwen3", tied=True)
    replica = build_replica(path, 1, Layout())
    rows = [make_tree_row(seed, 96) for seed in range(3)]
    rows = [with_behavior(row, logprobs) for row, logprobs in zip(rows, replica.logprobs(rows), strict=True)]
    before = to_numpy(replica.export_hf())
    found: dict[str, object] = {}

    replica.micro_step(rows, objective)
    found["no_rollouts"] = replica.apply(0).is_applied
    replica.micro_step([replace(row, advantage=0.0) for row in rows], objective)
    found["no_gradient"] = replica.apply(3).is_applied
    empty = replace(rows[0], num_targets=0, **{
        name: getattr(rows[0], name)[:0] for name in ("edge_source", "edge_token", "behavior_logprobs", "versions")
    })  # fmt: skip
    found["no_targets"] = replica.micro_step([empty], objective).num_targets
    found["no_targets_logprobs"] = len(replica.logprobs([empty, rows[1]])[0])
    found["unmoved"] = find_gap(to_numpy(replica.export_hf()), before)

    replica.load_hf(dict(replica.export_hf()))
    after = to_numpy(replica.export_hf())
    found["round_trip"] = all(np.array_equal(after[name], value) for name, value in before.items())
    with pytest.raises(RunError, match=r"model.norm.weight should be \(32,\), is nothing"):
        replica.load_hf({name: torch.tensor(v) for name, v in before.items() if name != "model.norm.weight"})
    with pytest.raises(AssertionError):
        replica.micro_step([replace(rows[0], num_targets=rows[0].num_targets + 1)], objective)

    replica.micro_step(rows, objective)
    whole = to_numpy(replica.export_gradients())
    replica.begin_step()
    for row in rows:
        replica.micro_step([row], objective)
    found["packing"] = find_gap(to_numpy(replica.export_gradients()), whole)
    found["stale_gap"] = replica.micro_step(rows, objective, policy_version=7).max_logprob_gap
    found["moved"] = replica.apply(3).is_applied
    return found


def test_a_replica_moves_only_with_a_gradient_and_packing_does_not_change_it(tmp_path: Path) -> None:
    (found,) = run_world(1, tmp_path, try_edge_cases)
    assert found.pop("packing") < 1e-6
    assert found == {
        "no_rollouts": False,
        "no_gradient": False,
        "no_targets": 0,
        "no_targets_logprobs": 0,
        "unmoved": 0.0,
        "round_trip": True,
        "stale_gap": 0.0,
        "moved": True,
    }


def warm_up(rank: int, world: Path) -> tuple[list[float], list[float]]:
    import json

    from gyre.train.folder import write_hf_folder
    from gyre.train.supervised import SupervisedRow, nll_micro_step

    config = json.loads((write_model(world / "model", "qwen3", tied=True) / "config.json").read_text())
    write_hf_folder(world / "untrained", config, {})
    (world / "untrained" / "model.safetensors").unlink()
    replica = build_replica(world / "untrained", 1, Layout())
    tokens = np.random.default_rng(0).integers(0, 96, 24).astype(np.int32)
    weights = np.full(24, 1 / 23, np.float32)
    weights[0] = 0.0
    losses = []
    for step in range(12):
        replica.begin_step()
        replica.set_learning_rate(1e-2 if step < 10 else 0.0)
        losses.append(nll_micro_step(replica, [SupervisedRow(tokens=tokens, weights=weights)]).loss)
        replica.apply(1)
    write_hf_folder(world / "trained", config, dict(replica.export_hf()))
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(world / "trained", dtype=torch.float32)
    ids = torch.tensor(tokens, dtype=torch.long)[None]
    return losses, [float(model(ids, labels=ids).loss)]


def test_supervised_steps_from_random_weights_learn_and_export_what_they_learned(tmp_path: Path) -> None:
    ((losses, exported),) = run_world(1, tmp_path, warm_up)
    assert losses[0] == pytest.approx(np.log(96), abs=0.3)
    assert losses[10] < losses[0] / 2
    assert losses[11] == losses[10]
    assert exported == [pytest.approx(losses[11], abs=1e-5)]


def hold_to_reference(rank: int, world: Path) -> dict[str, float]:
    from gyre.algo.objective import ObjectiveSettings
    from gyre.train.groups import make_data_groups
    from gyre.train.replica import OptimizerSettings, Replica

    path = write_model(world / "model", "qwen3", tied=True)
    replica = Replica.build(
        path,
        Layout(),
        make_data_groups(1, Layout()),
        OptimizerSettings(learning_rate=3e-3),
        is_core=True,
        has_reference=True,
    )
    objective = ObjectiveSettings(clip_low=CLIP_LOW, clip_high=CLIP_HIGH, kl_coefficient=0.1)
    rows = [make_tree_row(seed, 96) for seed in range(3)]
    first = replica.logprobs(rows)
    rows = [replace(row, behavior_logprobs=logprobs) for row, logprobs in zip(rows, first, strict=True)]
    found = {"kl_at_start": replica.micro_step(rows, objective).kl}
    replica.apply(3)
    now = replica.logprobs(rows)
    found["kl_after_a_step"] = replica.micro_step([replace(row, advantage=0.0) for row in rows], objective).kl
    gradients = to_numpy(replica.export_gradients())
    found["policy_is_back"] = float(all(np.array_equal(a, b) for a, b in zip(replica.logprobs(rows), now, strict=True)))
    replica.begin_step()
    weights = [0.1 * (1 - np.exp(a.astype(np.float64) - b)) / len(a) for a, b in zip(first, now, strict=True)]
    replica.backward(replica.forward_targets(rows), np.concatenate(weights))
    found["gap"] = find_gap(to_numpy(replica.export_gradients()), gradients)
    return found


def test_the_kl_term_holds_the_policy_to_the_weights_it_began_with(tmp_path: Path) -> None:
    (found,) = run_world(1, tmp_path, hold_to_reference)
    assert found["kl_at_start"] < 1e-12 and found["kl_after_a_step"] > 1e-6
    assert found["policy_is_back"] == 1.0 and found["gap"] < 1e-3, found
