"""
Tests of Hugging Face checkpoints in and out: model.py's load_hf, fill_from_hf, save_hf, config_from_hf.

The measure is transformers: its models, built small and random in the three layouts, with YaRN, groups and sequences
longer than YaRN's origin, must give our logits, in both directions. What transformers itself does not have (FP8 blocks,
DeepSeek's published config.json) is written out here.

B batch, S sequence, N rows and K columns of a weight.
"""

import gc
import json
import math
import resource
import shutil
import sys
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
pytest.importorskip("safetensors", reason="safetensors is not installed: pip install '.[hf]'")
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

import model as model_module
import quant
from model import PRESETS, Model, config_from_hf, fill_from_hf, hf_tensors, load_hf, save_hf
from quant import RECIPES

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=2.0, beta_slow=0.25, mscale=0.707,
            mscale_all_dim=0.707)
SIZES = dict(
    vocab_size=61, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
    first_k_dense_replace=1, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=32, qk_nope_head_dim=32,
    qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=8, num_experts_per_tok=3, max_position_embeddings=64,
    rope_theta=10000.0, rope_scaling=YARN)
LAYOUTS = {
    "v2": (DeepseekV2ForCausalLM, DeepseekV2Config, dict(
        q_lora_rank=48, n_shared_experts=2, n_group=4, topk_group=2, topk_method="group_limited_greedy",
        routed_scaling_factor=16.0)),
    "v2-lite": (DeepseekV2ForCausalLM, DeepseekV2Config, dict(
        q_lora_rank=None, n_shared_experts=2, n_group=1, topk_group=1, topk_method="greedy")),
    "v3": (DeepseekV3ForCausalLM, DeepseekV3Config, dict(q_lora_rank=48, n_shared_experts=1, n_group=4, topk_group=2))}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
IDS = torch.randint(61, (2, 48), generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(61, (2, 48), generator=torch.Generator().manual_seed(2))


def randomize(tensors):
    """Large enough for logits around 1, a router with opinions, and norms, biases and positions that matter."""
    generator = torch.Generator().manual_seed(0)
    for name, t in tensors:
        t.data.copy_(torch.randn(t.shape, generator=generator) * 0.15 + float("norm" in name))


def theirs(layout="v3", **changes):
    kind, config, extra = LAYOUTS[layout]
    net = kind(config(**SIZES | extra | changes)).eval()
    randomize([*net.named_parameters(), *((n, b) for n, b in net.named_buffers() if "correction_bias" in n)])
    return net


def ours(layout="v3", **changes):
    """The same configuration here, with other weights."""
    net = Model(replace(config_of(layout), **changes)).eval()
    randomize(net.state_dict().items())
    return net


def config_of(layout):
    _, config, extra = LAYOUTS[layout]
    return model_module._parse_hf(config(**SIZES | extra).to_dict())


def logits(net):
    with torch.no_grad():
        out = net(IDS)
    return out[0] if isinstance(net, Model) else out.logits


def stored(folder):
    """Every tensor of a checkpoint."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            tensors |= {name: f.get_tensor(name) for name in f.keys()}
    return tensors


def assert_same_tensors(a, b):
    assert a.keys() == b.keys() and not [name for name in b if not torch.equal(a[name], b[name])]


def rewrite(folder, config=(), tensors=(), drop=()):
    """Change a one-file checkpoint's config.json and tensors. A config value of None takes the key away."""
    path = folder / "config.json"
    changed = json.loads(path.read_text()) | dict(config)
    path.write_text(json.dumps({k: v for k, v in changed.items() if v is not None or k not in config}))
    kept = {name: t.clone() for name, t in stored(folder).items() if name not in drop} | dict(tensors)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 400
    return text


# -----------------------------------------------------------------------------
# parity

@every_layout
def test_parity_with_transformers(layout, tmp_path):
    """Logits to 1e-4, in both directions; what makes a layout moves them by much more."""
    reference = theirs(layout)
    reference.save_pretrained(tmp_path / "in", max_shard_size="50KB")
    net, expected = load_hf(tmp_path / "in").eval(), logits(reference)
    difference = (logits(net) - expected).abs().max().item()
    print(f"{layout}: max |logit difference| {difference:.1e}, logits' standard deviation {expected.std():.2f}")
    assert difference < 1e-4 and expected.std() > 0.5
    changes = [dict(yarn_factor=1.0), dict(yarn_mscale=1.0), dict(yarn_beta_fast=0.3), dict(yarn_beta_slow=0.05)]
    changes += [dict(route_scale=1.5)]
    changes += [dict(top_groups=4)] if net.config.n_groups > 1 else []
    for change in changes:
        other = Model(replace(net.config, **change)).eval()
        other.load_state_dict(net.state_dict())
        assert (logits(other) - expected).abs().max() > 0.05, change

    save_hf(net, tmp_path / "out", torch.float32, eos=7)
    back, loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(back) is type(reference) and not any(loaded.values())
    assert (back.config.bos_token_id, back.config.eos_token_id) == (None, 7) and back.dtype == torch.float32
    assert torch.equal(logits(back), expected)


@every_layout
def test_parity_of_bfloat16_weights(layout, tmp_path):
    """Rounded weights give the same logits there as here, computed in float32; the router's are not rounded."""
    net = ours(layout)
    save_hf(net, tmp_path / "out")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.dtype == torch.bfloat16 and back.model.layers[1].mlp.gate.weight.dtype == torch.float32
    assert torch.equal(back.model.layers[1].mlp.gate.weight, net.layers[1].ffn.router.weight)
    assert (logits(back.float()) - logits(load_hf(tmp_path / "out").eval())).abs().max() < 1e-4


@pytest.mark.parametrize("layout", ["v2", "v3"])
def test_softmax_scale_is_the_published_one(layout):
    """(0.1 * mscale_all_dim * ln(factor) + 1)^2 / sqrt(width), as modeling_deepseek.py of both checkpoints has it; the
    rotated part has no factor of its own, for mscale / mscale_all_dim is 1. transformers agrees on both."""
    attention, net = theirs(layout).model, ours(layout)
    expected = (0.1 * 0.707 * math.log(4) + 1) ** 2 / math.sqrt(48)
    assert attention.layers[0].self_attn.scaling == pytest.approx(expected, rel=1e-12)
    assert attention.rotary_emb.attention_scaling == 1
    assert net.layers[0].attn.scale == pytest.approx(expected, rel=1e-12)


@every_layout
def test_a_model_trained_here_has_the_same_loss_there(layout, tmp_path):
    theirs(layout).save_pretrained(tmp_path / "in")
    net = load_hf(tmp_path / "in").train()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    losses = []
    for _ in range(20):
        loss = net(IDS, TARGETS)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.update_balance()
        losses.append(loss.item())
    quant.new_epoch()
    save_hf(net.eval(), tmp_path / "out", torch.float32)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    there = F.cross_entropy(logits(back).flatten(0, 1), TARGETS.flatten()).item()
    with torch.no_grad():
        here = net(IDS, TARGETS)[1].item()
    print(f"{layout}: loss {losses[0]:.4f}, after 20 steps {here:.6f} here, {there:.6f} there")
    assert here < losses[0] - 0.5 and abs(there - here) < 1e-4


@every_layout
def test_generates_what_transformers_generates(layout, tmp_path):
    reference = theirs(layout, eos_token_id=None)
    reference.save_pretrained(tmp_path / "in")
    expected = reference.generate(IDS[:, :20], max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(load_hf(tmp_path / "in").eval().generate(IDS[:, :20], 12, temperature=0), expected)


# -----------------------------------------------------------------------------
# tensors come back as they were

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [True, False], ids=["sharded", "one file"])
@every_layout
def test_weights_return_exactly(layout, shards, dtype, tmp_path):
    """HF -> ours -> HF, bit for bit; the router's BF16 come back as the same numbers in float32."""
    theirs(layout).to(dtype).save_pretrained(tmp_path / "in", max_shard_size="50KB" if shards else "1GB")
    save_hf(load_hf(tmp_path / "in"), tmp_path / "out", dtype, shard_bytes=50_000 if shards else 10**9)
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert all(t.dtype == (torch.float32 if ".gate." in name else dtype) for name, t in after.items())
    assert_same_tensors(after, {name: t.to(after[name].dtype) for name, t in before.items()})
    assert len([*(tmp_path / "out").iterdir()]) > 4 if shards else 2
    assert all(file.stat().st_size < 60_000 for file in (tmp_path / "out").iterdir()) or not shards


def test_experts_in_one_tensor(tmp_path):
    """As transformers 5 has them in memory, and writes them on demand."""
    net = theirs()
    net.save_pretrained(tmp_path / "in", save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in stored(tmp_path / "in")
    assert (logits(load_hf(tmp_path / "in").eval()) - logits(net)).abs().max() < 1e-4


def test_every_name_and_shape_of_the_published_models():
    """On the meta device: as many tensors as the index files list, V3's with MTP and its copies but without scales."""
    for preset, layers in ("v2-lite", 27), ("v3", 61):
        with torch.device("meta"):
            names = hf_tensors(Model(replace(PRESETS[preset], mtp=preset == "v3")))
        c = PRESETS[preset]
        attention, moe = 2 + (3 if c.q_lora else 1) + 4, 1 + (c.gate == "sigmoid") + 3 * c.n_experts + 3
        mtp = attention + moe + 4 if preset == "v3" else 0
        assert len(names) == 3 + layers * attention + 3 * c.n_dense + c.n_moe * moe + mtp
        assert list(names[f"model.layers.{layers - 1}.mlp.experts.{c.n_experts - 1}.down_proj.weight"].shape) == [
            c.hidden, c.expert_width]


# -----------------------------------------------------------------------------
# FP8 checkpoints

def quantized_blocks(w_NK, generator):
    """E4M3 codes with a scale for each 128x128 block that is no power of two, and the numbers that they stand for."""
    n, k = w_NK.shape
    codes, scale = torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(-(-n // 128), -(-k // 128))
    exact = torch.empty(n, k, dtype=torch.float64)
    for i in range(0, n, 128):
        for j in range(0, k, 128):
            s = torch.rand((), generator=generator) * 0.01 + 0.001
            block = (w_NK[i:i + 128, j:j + 128] / s).clamp(-448, 448).to(torch.float8_e4m3fn)
            codes[i:i + 128, j:j + 128], scale[i // 128, j // 128] = block, s
            exact[i:i + 128, j:j + 128] = block.double() * s.double()
    return codes, scale, exact


def fp8_checkpoint(folder, **changes):
    """Linears and experts in FP8, widths that 128 does not divide, every scale in another file than its weight."""
    net = ours(hidden=192, dense_width=320, expert_width=72, n_layers=2, mtp=True, **changes)
    save_hf(net, folder, torch.float32)
    tensors, exact, generator = stored(folder), {}, torch.Generator().manual_seed(3)
    for name in [n for n in tensors if n.endswith("_proj.weight") or n.endswith("_mqa.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"], exact[name] = quantized_blocks(tensors[name], generator)
    files = {name: f"model-0000{1 + name.endswith('scale_inv')}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: t for name, t in tensors.items() if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8",
                                         weight_block_size=[128, 128])
    (folder / "config.json").write_text(json.dumps(config))
    return net, exact


def test_fp8_blocks_are_multiplied_out(tmp_path):
    """Product of code and scale, rounded once to float32, short blocks at both edges included."""
    net, exact = fp8_checkpoint(tmp_path / "in")
    loaded = load_hf(tmp_path / "in")
    assert len(exact) > 60 and loaded.mtp is not None
    for name, t in hf_tensors(loaded).items():
        expected = exact[name].float() if name in exact else hf_tensors(net)[name]
        if name.endswith("eh_proj.weight"):
            t = t.roll(192, 1)
            expected = exact[name].float()
        assert torch.equal(t, expected), name


# -----------------------------------------------------------------------------
# multi-token prediction

def test_mtp_computes_what_transformers_computes(tmp_path):
    """Its MtpModel reads our file: names, the order of eh_proj's halves, and h from behind the final norm."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip(f"transformers {transformers.__version__} has no MTP")
    net = ours(mtp=True)
    save_hf(net, tmp_path / "out", torch.float32)
    main = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "out")
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]  # it knows V3's own depth only, 61
    mtp = layers.MtpModel.from_pretrained(main)
    with torch.no_grad():
        h = main(IDS, output_hidden_states=True).hidden_states[-1]
        x = mtp.forward_layer(0, h[:, :-1], torch.arange(1, 48).expand(2, -1), None, input_ids=TARGETS[:, :-1])
        there = F.cross_entropy(mtp._project_to_logits(x).flatten(0, 1), TARGETS[:, 1:].flatten(), reduction="sum")
        here, _ = net.mtp(net, net.trunk(IDS)[0], TARGETS)
    print(f"MTP's summed cross entropy: {here.item():.4f} here, {there.item():.4f} there")
    assert here.item() == pytest.approx(there.item(), rel=1e-6)


def test_mtp_returns_exactly_and_may_be_left_out(tmp_path):
    """With the copies of embedding and head that published checkpoints carry."""
    net = ours(mtp=True)
    save_hf(net, tmp_path / "a", torch.float32)
    both = load_hf(tmp_path / "a")
    assert_same_tensors(both.state_dict(), net.state_dict())
    save_hf(both, tmp_path / "b", torch.float32)
    assert_same_tensors(stored(tmp_path / "b"), stored(tmp_path / "a"))
    assert torch.equal(stored(tmp_path / "a")["model.layers.3.shared_head.head.weight"], net.head)
    assert json.loads((tmp_path / "a/config.json").read_text())["num_nextn_predict_layers"] == 1
    main = ours()
    fill_from_hf(main, tmp_path / "a")
    assert_same_tensors(main.state_dict(), {n: t for n, t in net.state_dict().items() if not n.startswith("mtp.")})


def test_mtp_announced_without_tensors(tmp_path):
    """transformers' config says num_nextn_predict_layers=1 whatever it saves."""
    theirs().save_pretrained(tmp_path / "in")
    assert json.loads((tmp_path / "in/config.json").read_text())["num_nextn_predict_layers"] == 1
    assert not config_from_hf(tmp_path / "in").mtp and load_hf(tmp_path / "in").mtp is None
    with pytest.raises(ValueError, match="lacks tensors: model.layers.3") as error:
        fill_from_hf(ours(mtp=True), tmp_path / "in")
    one_line(error)


# -----------------------------------------------------------------------------
# config.json

PUBLISHED = {
    "v3": dict(
        architectures=["DeepseekV3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=0, ep_size=1,
        eos_token_id=1, first_k_dense_replace=3, hidden_act="silu", hidden_size=7168, initializer_range=0.02,
        intermediate_size=18432, kv_lora_rank=512, max_position_embeddings=163840, model_type="deepseek_v3",
        moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1,
        norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61,
        num_key_value_heads=128, num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        quantization_config=dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8",
                                 weight_block_size=[128, 128]),
        rms_norm_eps=1e-6, rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                                             original_max_position_embeddings=4096, type="yarn"),
        rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", tie_word_embeddings=False, topk_group=4,
        topk_method="noaux_tc", torch_dtype="bfloat16", use_cache=True, v_head_dim=128, vocab_size=129280),
    "v2-lite": dict(
        architectures=["DeepseekV2ForCausalLM"], attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001,
        bos_token_id=100000, eos_token_id=100001, first_k_dense_replace=1, hidden_act="silu", hidden_size=2048,
        initializer_range=0.02, intermediate_size=10944, kv_lora_rank=512, max_position_embeddings=163840,
        model_type="deepseek_v2", moe_intermediate_size=1408, moe_layer_freq=1, n_group=1, n_routed_experts=64,
        n_shared_experts=2, norm_topk_prob=False, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27,
        num_key_value_heads=16, pretraining_tp=1, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rms_norm_eps=1e-6, rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=0.707, mscale_all_dim=0.707,
                                             original_max_position_embeddings=4096, type="yarn"),
        rope_theta=10000, routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True, tie_word_embeddings=False,
        topk_group=1, topk_method="greedy", torch_dtype="bfloat16", use_cache=True, v_head_dim=128, vocab_size=102400)}
PUBLISHED["v2"] = PUBLISHED["v2-lite"] | dict(
    hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536, n_group=8, n_routed_experts=160,
    num_attention_heads=128, num_hidden_layers=60, num_key_value_heads=128, q_lora_rank=1536,
    routed_scaling_factor=16.0, topk_group=3, topk_method="group_limited_greedy")


def write_config(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_configs_are_our_presets(preset, tmp_path):
    """With the long context that presets leave off, and another initial deviation."""
    config = config_from_hf(write_config(tmp_path, PUBLISHED[preset]))
    assert config == replace(PRESETS[preset], yarn_factor=40, max_seq_len=163840, init_std=0.02)


def test_both_spellings_of_rope(tmp_path):
    old = PUBLISHED["v2"]
    without = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    new = {("rope_type" if key == "type" else key): value for key, value in old["rope_scaling"].items()}
    theta = dict(rope_theta=5000.0)
    configs = [config_from_hf(write_config(tmp_path, c)) for c in (
        old | theta, without | dict(rope_parameters=new | theta), without | theta | dict(rope_parameters=new),
        without | dict(rope_scaling=new | theta, rope_theta=7.0),
        old | theta | dict(rope_scaling=new, rope_parameters=None))]
    assert all(c == configs[0] for c in configs) and configs[0].rope_base == 5000 and configs[0].yarn_factor == 40
    plain = [config_from_hf(write_config(tmp_path, without | c)) for c in (
        theta, dict(rope_parameters=dict(rope_type="default", **theta)), dict(rope_scaling=None, **theta))]
    assert all(c == plain[0] for c in plain) and plain[0].rope_base == 5000 and plain[0].yarn_factor == 1


@every_layout
@pytest.mark.parametrize(
    "change", [dict(), dict(yarn_factor=1.0), dict(n_groups=1, top_groups=1), dict(n_dense=0, q_lora=0)], ids=str)
def test_configs_return(layout, change):
    """What save_hf writes reads back as it was, but for the fields that only training knows."""
    config = replace(config_of(layout), **change, balance_alpha=0.5, mtp_weight=0.1)
    back = model_module._parse_hf(json.loads(json.dumps(model_module._hf_config(config))))
    assert back == replace(config, balance_alpha=back.balance_alpha, mtp_weight=back.mtp_weight, **{
        name: getattr(back, name) for name in model_module._HF_YARN if config.yarn_factor == 1})


@pytest.mark.parametrize("key, value", [
    ("model_type", "deepseek_v32"), ("model_type", None), ("model_type", ["deepseek_v3"]), ("attention_bias", True),
    ("tie_word_embeddings", True), ("hidden_act", "gelu"), ("moe_layer_freq", 2), ("norm_topk_prob", False),
    ("scoring_func", "softmax"), ("topk_method", "greedy"), ("ep_size", 8), ("num_key_value_heads", 64),
    ("mlp_bias", True), ("attention_dropout", 0.1), ("rope_interleave", False), ("rms_norm_eps", 1e-5),
    ("num_nextn_predict_layers", 2), ("original_max_position_embeddings", 8192), ("rope_scaling", "yarn"),
    ("hidden_size", "7168"), ("hidden_size", 7168.5), ("n_group", 7), ("num_experts_per_tok", None),
    ("rope_scaling.type", "linear"), ("rope_scaling.rope_type", "longrope"), ("rope_scaling.mscale", 0.707),
    ("rope_scaling.mscale_all_dim", 0), ("rope_scaling.mscale", None), ("rope_scaling.attention_factor", 1.2),
    ("rope_scaling.truncate", False), ("rope_scaling.partial_rotary_factor", 0.5), ("rope_scaling.factor", 0.5),
    ("rope_scaling.original_max_position_embeddings", None), ("quantization_config.quant_method", "awq"),
    ("quantization_config.weight_block_size", [64, 64]), ("quantization_config.fmt", "e5m2")], ids=str)
def test_what_config_json_may_not_ask_for(key, value, tmp_path):
    """One line with the file, the key (or our field) and the value."""
    config, (*outer, key) = json.loads(json.dumps(PUBLISHED["v3"])), key.split(".")
    (config[outer[0]] if outer else config)[key] = value
    with pytest.raises(ValueError) as error:
        config_from_hf(write_config(tmp_path, config))
    text, names = one_line(error), {theirs: ours for ours, theirs in
                                    {**model_module._HF_FIELDS, **model_module._HF_YARN}.items()}
    assert "config.json" in text and any(f"{name}" in text for name in (key, names.get(key, key), "rope_type"))
    assert repr(value) in text or value is None


@pytest.mark.parametrize("key, value", [
    ("norm_topk_prob", True), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("n_group", None),
    ("q_lora_rank", "absent")])
def test_what_v2_may_not_ask_for(key, value, tmp_path):
    config = PUBLISHED["v2"] | {key: value}
    with pytest.raises(ValueError, match=key):
        config_from_hf(write_config(tmp_path, {k: v for k, v in config.items() if v != "absent"}))


# -----------------------------------------------------------------------------
# damaged, foreign and half-written checkpoints

NORM, PROJ, EMBED = "model.norm.weight", "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"
DAMAGES = {
    "config.json.* does not exist": lambda f: (f / "config.json").unlink(),
    "config.json is not JSON": lambda f: (f / "config.json").write_text('{"model_type": '),
    "config.json is not JSON.*utf-8": lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
    "holds no JSON object": lambda f: (f / "config.json").write_text("[1, 2]"),
    "model_type='llama' is neither": lambda f: rewrite(f, dict(model_type="llama")),
    "num_hidden_layers is missing": lambda f: rewrite(f, dict(num_hidden_layers=None)),
    "model.safetensors is missing": lambda f: (f / "model.safetensors").unlink(),
    "model.safetensors is damaged": lambda f: (f / "model.safetensors").write_bytes(
        (f / "model.safetensors").read_bytes()[:-100]),
    "model.safetensors is damaged.*": lambda f: (f / "model.safetensors").write_bytes(b""),
    "model.safetensors is damaged: .*": lambda f: (f / "model.safetensors").write_bytes(b"<html>not found</html>" * 99),
    "lacks tensors: model.norm.weight": lambda f: rewrite(f, drop=[NORM]),
    "lacks tensors: model.layers.0.mlp.down_proj.weight and 1 more": lambda f: rewrite(f, drop=[NORM, PROJ]),
    "lacks tensors: model.layers.3.*and 37 more": lambda f: rewrite(f, dict(num_hidden_layers=4)),
    "unexpected tensors: lm_head.bias": lambda f: rewrite(f, tensors={"lm_head.bias": torch.zeros(61)}),
    "unexpected tensors: model.layers.2.*and 37 more": lambda f: rewrite(f, dict(num_hidden_layers=2)),
    r"model.norm.weight has the shape \[65\].*\[64\]": lambda f: rewrite(f, tensors={NORM: torch.ones(65)}),
    r"model.embed_tokens.weight has the shape \[61, 64\].*\[99, 64\]": lambda f: rewrite(f, dict(vocab_size=99)),
    "model.norm.weight is torch.int64": lambda f: rewrite(f, tensors={NORM: torch.ones(64).long()}),
    "model.norm.weight is torch.float64": lambda f: rewrite(f, tensors={NORM: torch.ones(64).double()}),
    "down_proj.weight is torch.float8_e4m3fn without a scale": lambda f: rewrite(
        f, tensors={PROJ: torch.ones(64, 96).to(torch.float8_e4m3fn)}),
    "down_proj.weight is torch.float8_e5m2 with a scale": lambda f: rewrite(
        f, tensors={PROJ: torch.ones(64, 96).to(torch.float8_e5m2), f"{PROJ}_scale_inv": torch.ones(1, 1)}),
    "down_proj.weight is torch.float32 with a scale": lambda f: rewrite(
        f, tensors={f"{PROJ}_scale_inv": torch.ones(1, 1)}),
    "norm.weight is torch.float8_e4m3fn with a scale": lambda f: rewrite(
        f, tensors={NORM: torch.ones(64).to(torch.float8_e4m3fn), f"{NORM}_scale_inv": torch.ones(1)}),
    r"down_proj.weight_scale_inv: it takes \[1, 1\] finite": lambda f: rewrite(
        f, tensors={PROJ: torch.ones(64, 96).to(torch.float8_e4m3fn), f"{PROJ}_scale_inv": torch.tensor([[math.nan]])}),
    r"down_proj.weight_scale_inv: it takes \[1, 1\].*\[2, 1\]": lambda f: rewrite(
        f, tensors={PROJ: torch.ones(64, 96).to(torch.float8_e4m3fn), f"{PROJ}_scale_inv": torch.ones(2, 1)}),
    r"down_proj.weight_scale_inv: it takes .*bfloat16": lambda f: rewrite(f, tensors={
        PROJ: torch.ones(64, 96).to(torch.float8_e4m3fn), f"{PROJ}_scale_inv": torch.ones(1, 1).bfloat16()})}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A good checkpoint in one file, and the same in many."""
    folder = tmp_path_factory.mktemp("whole")
    save_hf(ours(), folder / "one", torch.float32)
    save_hf(ours(), folder / "many", torch.float32, shard_bytes=50_000)
    return folder


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_checkpoints(message, whole, tmp_path):
    shutil.copytree(whole / "one", tmp_path / "in")
    DAMAGES[message](tmp_path / "in")
    with pytest.raises((ValueError, OSError), match=message) as error:
        load_hf(tmp_path / "in")
    one_line(error)


def test_damaged_shards(whole, tmp_path):
    shutil.copytree(whole / "many", tmp_path / "in")
    index, shard = tmp_path / "in/model.safetensors.index.json", next((tmp_path / "in").glob("model-00003-of*"))
    content, intact = shard.read_bytes(), index.read_text()
    assert_same_tensors(load_hf(tmp_path / "in").state_dict(), ours().state_dict())

    def fails(match):
        with pytest.raises((ValueError, OSError), match=match) as error:
            load_hf(tmp_path / "in")
        one_line(error)

    shard.unlink()
    fails(f"{shard.name} is missing: the checkpoint is incomplete")
    shard.write_bytes(content[:len(content) // 2])
    fails(f"{shard.name} is damaged")
    shutil.copy(next((tmp_path / "in").glob("model-00001-of*")), shard)  # another shard under its name
    fails(f"{shard.name} is damaged: .*tensor")
    shard.write_bytes(content)
    for broken in ("{}", '{"weight_map": ["a"]}', intact.replace(shard.name, f"../{shard.name}"), intact[:99]):
        index.write_text(broken)
        fails("index.json is (damaged|not JSON)")
    index.unlink()  # what an interrupted download leaves
    fails("model.safetensors is missing")


@pytest.mark.parametrize("change", [
    dict(hidden=72), dict(n_experts=12), dict(top_k=4), dict(gate="softmax"), dict(n_layers=2), dict(route_scale=1.5),
    dict(top_groups=3), dict(vocab_size=64), dict(q_lora=0)], ids=str)
def test_a_model_that_contradicts_the_checkpoint(change, whole):
    (field, value), config = next(iter(change.items())), config_of("v3")
    net = Model(replace(config, **change))
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(ValueError, match=f"{field}={getattr(config, field)}, this model has {field}={value}") as error:
        fill_from_hf(net, whole / "one")
    one_line(error)
    assert_same_tensors(net.state_dict(), before)


def test_a_model_may_differ_in_what_training_may_change(whole):
    net = Model(replace(config_of("v3"), max_seq_len=32, yarn_factor=1.0, balance_alpha=0.0, init_std=0.5))
    fill_from_hf(net, whole / "many")
    assert_same_tensors(net.state_dict(), ours().state_dict())


def test_filling_makes_quantized_weights_stale_case_19(whole):
    net, fresh = Model(config_of("v3")).eval(), load_hf(whole / "one").eval()
    net.recipe = fresh.recipe = RECIPES["fp8"]
    before = logits(net)
    fill_from_hf(net, whole / "one")
    assert torch.equal(logits(net), logits(fresh)) and not torch.equal(before, logits(net))


# -----------------------------------------------------------------------------
# memory

class Memory(TorchDispatchMode):
    """Peak of the bytes of tensors that torch made inside and that are alive. Files mapped into memory do not count."""

    def __enter__(self):
        self.alive, self.now, self.peak = set(), 0, 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **kwargs or {})
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.device.type != "meta":
                storage = t.untyped_storage()
                if storage._cdata not in self.alive | known:
                    self.alive.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        return out

    def free(self, key, size):
        self.alive.discard(key)
        self.now -= size


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_memory_of_loading_and_saving(kind, tmp_path):
    """Loading holds the model and a few float32 copies of one of the file's tensors; saving holds one shard."""
    gc.collect()
    config = dict(n_layers=6, hidden=512, expert_width=256, n_experts=16, dense_width=512, n_groups=4)
    if kind == "fp8":
        fp8_checkpoint(tmp_path / "in", n_experts=48, n_groups=4)
    else:
        save_hf(ours(**config), tmp_path / "in", shard_bytes=3_000_000)
    with Memory() as loading:
        net = load_hf(tmp_path / "in")
    model_bytes = sum(t.numel() * t.element_size() for t in [*net.parameters(), *net.buffers()])
    largest = max(t.numel() * 4 for t in hf_tensors(net).values())
    assert model_bytes <= loading.peak <= model_bytes + 8 * largest < 1.5 * model_bytes
    with Memory() as saving:
        save_hf(net, tmp_path / "out", torch.bfloat16, shard_bytes=1_000_000)
    assert 900_000 < saving.peak <= 1_100_000 + 4 * largest


# -----------------------------------------------------------------------------
# saving

def test_folders_that_are_not_empty_are_left_alone(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in "full", "file":
        with pytest.raises(ValueError, match=f"{name} exists and is no empty folder") as error:
            save_hf(ours(), tmp_path / name)
        one_line(error)
    assert (tmp_path / "full/notes").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    (tmp_path / "deeper/new.tmp").mkdir(parents=True)
    (tmp_path / "deeper/new.tmp/left").write_text("by a killed run")
    for name in "empty", "deeper/new":
        save_hf(ours(), tmp_path / name)
        assert {f.name for f in (tmp_path / name).iterdir()} == {"config.json", "model.safetensors"}
    assert {f.name for f in (tmp_path / "deeper").iterdir()} == {"new"}


def test_no_space_left(tmp_path):
    """The limit on a file's size stands for a full disk. Nothing is left behind."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    net = ours()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="out could not be written") as error:
            save_hf(net, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one_line(error)
    assert not [*tmp_path.iterdir()]


def test_a_killed_save_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    """While weights are written the folder does not exist, and what lies aside has no config.json."""
    seen, net = [], ours()
    write = model_module._safetensors().torch.save_file

    def spy(*args):
        write(*args)
        seen.append(((tmp_path / "out").exists(), (tmp_path / "out.tmp/config.json").exists()))

    monkeypatch.setattr("safetensors.torch.save_file", spy)
    save_hf(net, tmp_path / "out", shard_bytes=50_000)
    assert len(seen) > 3 and not any(map(any, seen)) and (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("layout, change, dtype, message", [
    ("v3", dict(group_score="max"), torch.float32, "group_score=max"), ("v3", {}, torch.int8, "int8"),
    ("v2", dict(group_score="top2"), torch.float32, "group_score=top2"),
    ("v3", dict(n_shared=0), torch.float32, "n_shared=0"), ("v2", dict(mtp=True), torch.float32, "mtp=True"),
    ("v3", dict(norm_eps=1e-5), torch.float32, "norm_eps=1e-05"),
    ("v3", dict(yarn_mscale=0.0), torch.float32, "mscale=0.0"),
    ("v3", {}, torch.float64, "float64"), ("v3", {}, torch.float8_e4m3fn, "float8")])
def test_what_cannot_be_saved(layout, change, dtype, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        save_hf(ours(layout, **change), tmp_path / "out", dtype)
    one_line(error)
    assert not [*tmp_path.iterdir()]


def test_safetensors_is_asked_for_by_name(whole, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (lambda: load_hf(whole / "one"), lambda: save_hf(ours(), tmp_path / "out")):
        with pytest.raises(ImportError, match=r"needs safetensors: pip install '\.\[hf\]'") as error:
            call()
        one_line(error)
