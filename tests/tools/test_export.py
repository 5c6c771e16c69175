"""A checkpoint of verl's actor becomes a directory that transformers loads, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra [cpu]")

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import support.verl_trainer_imports  # noqa: F401
from agl_fast.__main__ import main
from agl_fast.tools.export import actor_folder, export
from support import engine_workers
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl and what it imports


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, ["count from one to ten"], max_length=64, seed=3)
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values), name


def test_a_checkpoint_that_verls_engine_saved(model: Path, tmp_path: Path, capsys: Any) -> None:
    config = engine_workers.configured(model, n_groups=2, group_size=2, widths=(8, 8), actor={})
    step = tmp_path / "run" / "global_step_3"
    with engine_workers.one_rank():
        worker = engine_workers.engine_worker(config)
        with torch.no_grad():
            for parameter in worker.engine.module.parameters():
                parameter.add_(0.001)
        trained = {
            name: values.full_tensor().detach().clone()
            for name, values in worker.engine.module.state_dict().items()
        }
        worker.save_checkpoint(str(step / "actor"), global_step=3)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    assert str(step / "actor") in capsys.readouterr().out
    assert_same_weights(weights_of(out), trained)
    assert not torch.equal(trained["lm_head.weight"], weights_of(model)["lm_head.weight"])
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (model, out)]
    for text in ("count from one", "<|im_start|>user\nten<|im_end|>"):
        assert tokenizers[1](text).input_ids == tokenizers[0](text).input_ids
    chat = [{"role": "user", "content": "ten"}]
    first, second = (
        each.apply_chat_template(chat, add_generation_prompt=True) for each in tokenizers
    )
    assert first == second


def shards(
    model: Path,
    folder: Path,
    *,
    n_replicas: int = 1,
    n_shards: int = 2,
    without: str | None = None,
) -> Path:
    """As FSDP2 saves them, every rank a file: parameters cut in their first dimension."""
    folder.mkdir(parents=True)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "huggingface")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.config.save_pretrained(folder / "huggingface")
    world_size = n_replicas * n_shards
    (folder / "fsdp_config.json").write_text(json.dumps({"world_size": world_size}))
    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            whole = {name: each for name, each in loaded.state_dict().items() if name != without}
            state = sharded_state(whole, n_replicas, n_shards, rank % n_shards)
            torch.save(state, folder / f"model_world_size_{world_size}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    return folder


def sharded_state(
    weights: dict[str, torch.Tensor], n_replicas: int, n_shards: int, part: int
) -> dict[str, Any]:
    if n_replicas == 1:
        mesh = init_device_mesh("cpu", (n_shards,), mesh_dim_names=("fsdp",))
        placements: tuple[Any, ...] = (Shard(0),)
    else:
        mesh = init_device_mesh("cpu", (n_replicas, n_shards), mesh_dim_names=("ddp", "fsdp"))
        placements = (Replicate(), Shard(0))
    return {
        name: DTensor.from_local(
            values.chunk(n_shards)[part].clone(),
            mesh,
            placements,
            run_check=False,
            shape=values.shape,
            stride=values.stride(),
        )
        for name, values in weights.items()
    }


@pytest.mark.parametrize(("n_replicas", "n_shards"), [(1, 2), (1, 3), (2, 2)])
def test_shards_of_several_ranks(
    model: Path, tmp_path: Path, n_replicas: int, n_shards: int
) -> None:
    folder = shards(model, tmp_path / "actor", n_replicas=n_replicas, n_shards=n_shards)
    assert export(tmp_path, tmp_path / "out") == folder
    assert_same_weights(weights_of(tmp_path / "out"), weights_of(model))


def test_another_dtype(model: Path, tmp_path: Path) -> None:
    folder = shards(model, tmp_path / "actor")
    assert main(["export", str(folder), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    expected = {name: values.bfloat16() for name, values in weights_of(model).items()}
    assert_same_weights(weights_of(tmp_path / "out"), expected)


@pytest.mark.parametrize("told", ["both", "embedding", "lm_head"])
def test_tied_weights_are_written_once(model: Path, tmp_path: Path, told: str) -> None:
    """As transformers saves them; a checkpoint may name both, or either."""
    config = AutoConfig.from_pretrained(model)
    config.tie_word_embeddings = True
    (tmp_path / "tied").mkdir()
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "tied")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    left_out = {"both": None, "embedding": head, "lm_head": embedding}[told]
    folder = shards(tmp_path / "tied", tmp_path / "actor", without=left_out)
    export(folder, tmp_path / "out")
    saved = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "tied")]
    assert_same_weights(*saved)
    assert head not in saved[0]
    loaded = weights_of(tmp_path / "out")
    assert torch.equal(loaded[head], loaded[embedding])


def test_tied_weights_that_differ_are_refused(model: Path, tmp_path: Path) -> None:
    folder = shards(model, tmp_path / "actor")
    path = folder / "huggingface" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
        export(folder, tmp_path / "out")


def test_a_shard_runs_no_code(model: Path, tmp_path: Path) -> None:
    folder = shards(model, tmp_path / "actor", n_shards=1)
    ran = tmp_path / "ran"

    class Code:
        def __reduce__(self) -> Any:
            return Path.touch, (ran,)

    torch.save({"weight": Code()}, folder / "model_world_size_1_rank_0.pt")
    with pytest.raises(ValueError, match="holds more than tensors"):
        export(folder, tmp_path / "out")
    assert not ran.exists()


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a checkpoint of verl's FSDP actor"):
        actor_folder(tmp_path)


def test_a_folder_that_is_not_empty(model: Path, tmp_path: Path) -> None:
    folder = shards(model, tmp_path / "actor")
    with pytest.raises(FileExistsError, match="is not empty"):
        export(folder, model)


def test_weights_that_do_not_fit(model: Path, tmp_path: Path) -> None:
    folder = shards(model, tmp_path / "actor")
    path = folder / "huggingface" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_hidden_layers": 1, "layer_types": None}))
    with pytest.raises(ValueError, match=r"unknown \['model.layers.1"):
        export(folder, tmp_path / "out")


def test_an_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    folder = shards(model, tmp_path / "actor", n_shards=1)
    path = folder / "model_world_size_1_rank_0.pt"
    torch.save({"base.lora_A.weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="holds a LoRA adapter"):
        export(folder, tmp_path / "out")
