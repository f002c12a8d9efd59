"""Weights: whatever the file, the same float32 tensors come out; what is missing or odd is named."""

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from gguf import GGUFEndian
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file, save, save_file

from core.errors import ModelLoadError
from core.model import weights
from core.model.config import rope_frequencies
from core.model.weights import LoadedWeights, expected_shapes, load_model_config, load_model_files
from tools.make_tiny_gguf import TinyModel, write_gguf, write_safetensors_dir

TIED = TinyModel()
UNTIED = TinyModel(seed=1, is_tied=False)


def assert_same_tensors(expected: dict[str, NDArray[np.float32]], loaded: LoadedWeights) -> None:
    assert sorted(expected) == sorted(loaded.tensors)
    for name, value in expected.items():
        assert np.float32 == loaded.tensors[name].dtype, name
        np.testing.assert_array_equal(value, loaded.tensors[name], err_msg=name)


@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_safetensors_and_gguf_twins_load_to_equal_tensors(model: TinyModel, tmp_path: Path) -> None:
    assert_same_tensors(model.weights(), load_model_files(write_safetensors_dir(model, tmp_path / "hf")))
    assert_same_tensors(model.weights(), load_model_files(write_gguf(model, tmp_path / "model.gguf")))


def test_tied_model_has_no_output_matrix_and_untied_has(tmp_path: Path) -> None:
    for model in (TIED, UNTIED):
        loaded = load_model_files(write_gguf(model, tmp_path / "model.gguf"))
        assert model.is_tied == loaded.config.tie_word_embeddings
        assert model.is_tied == ("lm_head.weight" not in loaded.tensors)


def test_repeated_embedding_of_a_tied_checkpoint_is_dropped(tmp_path: Path) -> None:
    path = write_safetensors_dir(TIED, tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, path / "model.safetensors")

    assert_same_tensors(TIED.weights(), load_model_files(path))


def test_other_output_matrix_is_used_although_the_config_ties_it(tmp_path: Path) -> None:
    path = write_safetensors_dir(TIED, tmp_path)
    tensors = load_file(path / "model.safetensors")
    head = np.roll(tensors["model.embed_tokens.weight"], 1, axis=0)
    save_file(tensors | {"lm_head.weight": head}, path / "model.safetensors")

    loaded = load_model_files(path)
    assert not loaded.config.tie_word_embeddings
    assert_same_tensors(TIED.weights() | {"lm_head.weight": head}, loaded)


@pytest.mark.parametrize("places", [None, [], {"model.norm.weight": 1}])
def test_index_without_places_is_a_load_error(places: object, tmp_path: Path) -> None:
    path = write_safetensors_dir(TIED, tmp_path, num_shards=2)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelLoadError, match=r"index\.json has no weight_map"):
        load_model_files(path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    path = write_safetensors_dir(TIED, tmp_path, num_shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.safetensors cannot be read"):
        load_model_files(path)


def test_shards_are_put_together(tmp_path: Path) -> None:
    path = write_safetensors_dir(TIED, tmp_path, num_shards=3)

    assert 3 == len(list(path.glob("*.safetensors")))
    assert_same_tensors(TIED.weights(), load_model_files(path))


def test_float16_is_widened(tmp_path: Path) -> None:
    expected = {name: value.astype(np.float16).astype(np.float32) for name, value in TIED.weights().items()}
    assert_same_tensors(expected, load_model_files(write_safetensors_dir(TIED, tmp_path, dtype=np.float16)))


def test_bfloat16_is_widened_by_its_bits(tmp_path: Path) -> None:
    """NumPy has no bfloat16: the file is written as uint16 and its header corrected."""
    path = write_safetensors_dir(TIED, tmp_path)
    halves = {name: (value.view(np.uint32) >> 16).astype(np.uint16) for name, value in TIED.weights().items()}
    content = save(halves)
    header_end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:header_end].replace(b'"U16"', b'"BF16"').rstrip(b" ")
    header += b" " * (-len(header) % 8)
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[header_end:])

    expected = {name: (value.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, value in TIED.weights().items()}
    assert_same_tensors(expected, load_model_files(path))


@pytest.mark.parametrize(
    "quant", [Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q5_1, Quant.Q5_0, Quant.Q4_1, Quant.Q4_0], ids=lambda q: q.name
)
def test_quantized_gguf_holds_what_the_quantizer_kept(quant: Quant, tmp_path: Path) -> None:
    """Rows are quantized one by one, so their order does not matter to what is kept of each."""

    def kept(value: NDArray[np.float32]) -> NDArray[np.float32]:
        return value if value.ndim == 1 else np.asarray(dequantize(quantize(value, quant), quant), np.float32)

    loaded = load_model_files(write_gguf(UNTIED, tmp_path / "model.gguf", quant=quant))
    assert_same_tensors({name: kept(value) for name, value in UNTIED.weights().items()}, loaded)


def test_weights_that_cannot_be_held_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is float32 in the file is mapped and takes none; the rest becomes float32, all of it."""
    plain = [write_safetensors_dir(TIED, tmp_path / "f32"), write_gguf(TIED, tmp_path / "f32.gguf")]
    halves = [write_safetensors_dir(TIED, tmp_path / "f16", dtype=np.float16, num_shards=2)]
    halves += [write_gguf(TIED, tmp_path / "f16.gguf", quant=Quant.F16)]
    num_bytes = 4 * sum(value.size for value in TIED.weights().values() if value.ndim > 1)  # norms stay in GGUF
    monkeypatch.setattr(weights, "memory_limit_bytes", lambda: num_bytes - 1)

    for path in plain:
        assert_same_tensors(TIED.weights(), load_model_files(path))
    for path in halves:
        with pytest.raises(
            ModelLoadError, match=rf"{path.name}: to load its weights takes .* limit is {num_bytes - 1:,}"
        ):
            load_model_files(path)


def test_number_of_parameters_is_that_of_the_tensors(tmp_path: Path) -> None:
    for model in (TIED, UNTIED):
        config = load_model_config(write_gguf(model, tmp_path / "model.gguf"))
        assert sum(value.size for value in model.weights().values()) == config.num_parameters


def test_config_alone_equals_the_loaded_one(tmp_path: Path) -> None:
    for path in (write_safetensors_dir(TIED, tmp_path / "hf"), write_gguf(TIED, tmp_path / "model.gguf")):
        assert load_model_files(path).config == load_model_config(path)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_rope_scaling_is_the_same_from_both_files(kind: str, tmp_path: Path) -> None:
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    scaling = {"rope_type": kind, "factor": 8.0} | (llama3 if kind == "llama3" else {})
    model = TinyModel(rope_scaling=scaling)
    from_hf = load_model_config(write_safetensors_dir(model, tmp_path / "hf"))
    from_gguf = load_model_config(write_gguf(model, tmp_path / "model.gguf"))

    np.testing.assert_allclose(rope_frequencies(from_hf), rope_frequencies(from_gguf), rtol=1e-6)
    assert not np.allclose(rope_frequencies(from_hf), rope_frequencies(load_model_config(
        write_safetensors_dir(TIED, tmp_path / "plain"))))  # fmt: skip


def test_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    path = write_safetensors_dir(TIED, tmp_path / "hf")
    tensors = TIED.weights()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"hf: tensor model\.layers\.1\.mlp\.up_proj\.weight .*\(96, 64\)"):
        load_model_files(path)

    gguf = write_gguf(TIED, tmp_path / "model.gguf", without=["blk.1.ffn_up.weight"])
    with pytest.raises(ModelLoadError, match=r"model\.gguf: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_model_files(gguf)


def test_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    odd = np.zeros((64, 32), np.float32)
    path = write_gguf(TIED, tmp_path / "model.gguf", extra_tensors={"blk.0.attn_q.weight": odd})
    with pytest.raises(ModelLoadError, match=r"q_proj\.weight has shape \(64, 32\), expected \(64, 64\)"):
        load_model_files(path)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "per_layer_token_embd.weight"])
def test_tensor_that_would_change_the_numbers_is_refused(name: str, tmp_path: Path) -> None:
    path = write_gguf(TIED, tmp_path / "model.gguf", extra_tensors={name: np.zeros(64, np.float32)})
    with pytest.raises(ModelLoadError, match=f"tensor {name} has no place"):
        load_model_files(path)


def test_tensor_of_another_type_is_refused(tmp_path: Path) -> None:
    path = write_safetensors_dir(TIED, tmp_path)
    tensors = TIED.weights() | {"model.norm.weight": np.ones(64, np.int32)}
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is I32"):
        load_model_files(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_cut_off_file_is_a_load_error_that_names_it(kind: str, share: float, tmp_path: Path) -> None:
    if kind == "gguf":
        path = file = write_gguf(TIED, tmp_path / "model.gguf")
    else:
        path = write_safetensors_dir(TIED, tmp_path / "hf")
        file = path / "model.safetensors"
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(ModelLoadError, match=file.name):
        load_model_files(path)


@pytest.mark.parametrize("name", ["no-such-model.gguf", "no-such-dir"])
def test_missing_path_is_a_load_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=name):
        load_model_files(tmp_path / name)


def test_directory_without_its_parts_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        load_model_files(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelLoadError, match=r"config\.json is not JSON"):
        load_model_files(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json is not JSON"):
        load_model_files(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TIED.hf_config()))
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        load_model_files(tmp_path)


def test_part_of_a_split_gguf_is_refused(tmp_path: Path) -> None:
    path = write_gguf(TIED, tmp_path / "model.gguf", metadata={"split.count": 2})
    with pytest.raises(ModelLoadError, match="one of 2 parts"):
        load_model_files(path)


@pytest.mark.parametrize("quant", [Quant.F32, Quant.Q8_0], ids=lambda q: q.name)
def test_gguf_of_the_other_byte_order_is_refused(quant: Quant, tmp_path: Path) -> None:
    """Its metadata could be read, and its tensors would be noise."""
    path = write_gguf(TIED, tmp_path / "model.gguf", quant=quant, byte_order=GGUFEndian.BIG)
    for load in (load_model_files, load_model_config):
        with pytest.raises(ModelLoadError, match="another byte order"):
            load(path)


@pytest.mark.parametrize("length", [2**20, 2**40, 2**64 - 1])
@pytest.mark.parametrize("key", ["tokenizer.ggml.token_type", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_length_that_the_file_does_not_have_is_refused(key: str, length: int, tmp_path: Path) -> None:
    """Rather than read on behind the end until memory is full."""
    path = write_gguf(TIED, tmp_path / "model.gguf")
    content = bytearray(path.read_bytes())
    at = content.index(key.encode() + b"\x09\0\0\0") + len(key) + 8  # behind the types of the field and of its items
    content[at : at + 8] = length.to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="is no whole GGUF file"):
        load_model_files(path)


def test_tensor_without_numbers_is_named(tmp_path: Path) -> None:
    path = write_gguf(TIED, tmp_path / "model.gguf", quant=Quant.Q8_0)
    content = bytearray(path.read_bytes())
    at = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4  # behind the number of dimensions
    content[at : at + 8] = bytes(8)
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tensor blk\.0\.attn_q\.weight cannot be read"):
        load_model_files(path)


def test_layers_that_the_file_does_not_have_are_not_counted_up(tmp_path: Path) -> None:
    path = write_gguf(TIED, tmp_path / "model.gguf", metadata={"llama.block_count": 2**31})
    with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.2\.input_layernorm\.weight is missing"):
        load_model_files(path)


def test_metadata_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = write_gguf(TIED, tmp_path / "model.gguf", metadata={"general.name": "a name"})
    path.write_bytes(path.read_bytes().replace(b"a name", b"\xff name"))
    with pytest.raises(ModelLoadError, match=r"model\.gguf: metadata general\.name is not UTF-8"):
        load_model_files(path)


def test_shapes_name_every_tensor_of_a_model(tmp_path: Path) -> None:
    config = load_model_config(write_safetensors_dir(UNTIED, tmp_path))
    assert {name: value.shape for name, value in UNTIED.weights().items()} == expected_shapes(config)


class TestConvertedWeightsAreKept:
    """With a cache directory a GGUF is converted once."""

    SCALED = TinyModel(
        seed=2,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )

    def kept(self, cache: Path) -> list[Path]:
        return sorted(cache.iterdir())

    def test_second_load_reads_what_the_first_wrote(self, tmp_path: Path) -> None:
        path = write_gguf(self.SCALED, tmp_path / "model.gguf", quant=Quant.Q8_0)
        first = load_model_files(path, cache_dir=tmp_path / "cache")
        (file,) = self.kept(tmp_path / "cache")
        state = file.stat()
        second = load_model_files(path, cache_dir=tmp_path / "cache")

        assert (state.st_ino, state.st_mtime_ns) == (file.stat().st_ino, file.stat().st_mtime_ns)
        assert first.config == second.config == load_model_config(path, cache_dir=tmp_path / "cache")
        assert_same_tensors(dict(first.tensors), second)

    def test_what_is_kept_is_what_is_loaded(self, tmp_path: Path) -> None:
        """Changing the kept file shows in the result: it is really used."""
        path = write_gguf(TIED, tmp_path / "model.gguf")
        load_model_files(path, cache_dir=tmp_path / "cache")
        (file,) = self.kept(tmp_path / "cache")
        content = bytearray(file.read_bytes())
        content[-4:] = np.float32(123.0).tobytes()
        file.write_bytes(content)

        loaded = load_model_files(path, cache_dir=tmp_path / "cache")
        assert 1 == sum(123.0 in value for value in loaded.tensors.values())

    @pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
    def test_damaged_file_is_made_anew(self, share: float, tmp_path: Path) -> None:
        path = write_gguf(TIED, tmp_path / "model.gguf")
        load_model_files(path, cache_dir=tmp_path / "cache")
        (file,) = self.kept(tmp_path / "cache")
        whole = file.read_bytes()
        os.truncate(file, int(len(whole) * share))

        assert_same_tensors(TIED.weights(), load_model_files(path, cache_dir=tmp_path / "cache"))
        assert whole == file.read_bytes()

    def test_file_of_other_making_is_made_anew(self, tmp_path: Path) -> None:
        path = write_gguf(TIED, tmp_path / "model.gguf")
        load_model_files(path, cache_dir=tmp_path / "cache")
        (file,) = self.kept(tmp_path / "cache")
        save_file(UNTIED.weights(), file)

        assert_same_tensors(TIED.weights(), load_model_files(path, cache_dir=tmp_path / "cache"))

    def test_another_model_at_the_same_path_replaces_the_old(self, tmp_path: Path) -> None:
        path = write_gguf(TIED, tmp_path / "model.gguf")
        load_model_files(path, cache_dir=tmp_path / "cache")
        write_gguf(UNTIED, path)

        assert_same_tensors(UNTIED.weights(), load_model_files(path, cache_dir=tmp_path / "cache"))
        assert 1 == len(self.kept(tmp_path / "cache"))

    def test_name_with_signs_of_a_pattern_stands_for_itself(self, tmp_path: Path) -> None:
        """The file of that name is kept once, and nobody else's is dropped."""
        other = write_gguf(TIED, tmp_path / "a b.gguf")
        load_model_files(other, cache_dir=tmp_path / "cache")
        path = write_gguf(TIED, tmp_path / "[a] *.gguf")
        for model in (TIED, UNTIED):
            load_model_files(write_gguf(model, path), cache_dir=tmp_path / "cache")
        assert ["[", "a"] == [file.name[0] for file in self.kept(tmp_path / "cache")]

    def test_name_as_long_as_names_may_be_is_kept_too(self, tmp_path: Path) -> None:
        path = write_gguf(TIED, tmp_path / f"{'m' * 250}.gguf")
        load_model_files(path, cache_dir=tmp_path / "cache")
        assert 1 == len(self.kept(tmp_path / "cache"))

    def test_full_disk_costs_only_time(self, tmp_path: Path) -> None:
        """A limit on the size of files stands for the disk; nothing half written is left."""
        path = write_gguf(TIED, tmp_path / "model.gguf")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            loaded = load_model_files(path, cache_dir=tmp_path / "cache")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        assert_same_tensors(TIED.weights(), loaded)
        assert [] == self.kept(tmp_path / "cache")

    def test_cache_that_cannot_be_written_costs_only_time(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("a file where the directory should be")
        path = write_gguf(TIED, tmp_path / "model.gguf")

        assert_same_tensors(TIED.weights(), load_model_files(path, cache_dir=tmp_path / "cache"))
