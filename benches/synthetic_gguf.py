#!/usr/bin/env python3
"""Write a synthetic Muse Glimmer GGUF (random weights, exact geometry) for side-by-side benchmarks.

usage: synthetic_gguf.py OUT [--layers 52] [--vocab 202048] [--quant q4_k_m] [--seed 1]
Mixes: q4_k_m, q5_k_m (Q6_K for the head and, in about half of the layers, for ffn_down and attn_v); every other name
is one type for all matrices: q4_k, q5_k, q6_k, q8_0, iq4_xs, iq3_xxs, q3_k, nvfp4, f16, bf16, f32. Needs the 'gguf' Python package. Blocks are random but have sane scales, so activations stay finite.
"""
import argparse, numpy as np
import gguf
from gguf import GGMLQuantizationType as T

p = argparse.ArgumentParser()
p.add_argument("out"); p.add_argument("--layers", type=int, default=52)
p.add_argument("--vocab", type=int, default=202048)
p.add_argument("--embd", type=int, default=6656); p.add_argument("--ff", type=int, default=19968)
p.add_argument("--heads", type=int, default=32); p.add_argument("--kv", type=int, default=2)
p.add_argument("--quant", default="q4_k_m"); p.add_argument("--seed", type=int, default=1)
a = p.parse_args()
rng = np.random.default_rng(a.seed)
HD = 128
FLOATS = (T.F16, T.BF16, T.F32)

def f16(x): return np.asarray(x, dtype=np.float16).view(np.uint8)

POOL = {}
def block_bytes(t, n_in):
    """A pool of random blocks of type t scaled for fan-in n_in (std about 1/sqrt(n_in))."""
    key = (t, n_in)
    if key in POOL: return POOL[key]
    n = 1 << 16
    s = 1.0 / np.sqrt(n_in)
    if t in (T.Q4_K, T.Q5_K):   # d, dmin f16; 12 scale bytes; codes
        size, spread, centre = (144, 4.6, 7.5) if t == T.Q4_K else (176, 9.2, 15.5)
        b = rng.integers(0, 256, (n, size), dtype=np.uint8)
        d = np.full(n, s / (32 * spread)); b[:, 0:2] = f16(d).reshape(n, 2)
        b[:, 2:4] = f16(d * centre).reshape(n, 2)
        sc = rng.integers(24, 40, (n, 8), dtype=np.uint8)   # equal scale and min keep the mean near zero
        b[:, 4:16] = 0
        for j in range(4):
            b[:, 4 + j] = (sc[:, j] & 63) | ((sc[:, j + 4] >> 4) << 6)
            b[:, 8 + j] = (sc[:, j] & 63) | ((sc[:, j + 4] >> 4) << 6)
            b[:, 12 + j] = (sc[:, j + 4] & 15) | ((sc[:, j + 4] & 15) << 4)
    elif t == T.Q6_K:  # ql 128, qh 64, scales 16 i8, d f16
        b = rng.integers(0, 256, (n, 210), dtype=np.uint8)
        b[:, 192:208] = rng.integers(24, 40, (n, 16), dtype=np.uint8)
        b[:, 208:210] = f16(np.full(n, s / (32 * 18.5))).reshape(n, 2)
    elif t == T.Q8_0:
        b = rng.integers(0, 256, (n, 34), dtype=np.uint8)
        b[:, 0:2] = f16(np.full(n, s / 74)).reshape(n, 2)
    elif t in FLOATS:
        b = (rng.standard_normal((n, 16)) * s).astype(np.float16 if t == T.F16 else np.float32).view(np.uint8)
        if t == T.BF16: b = np.ascontiguousarray(b.reshape(n, 16, 4)[:, :, 2:]).reshape(n, 32)
    elif t == T.NVFP4:  # four UE4M3 scales, then codes
        b = rng.integers(0, 256, (n, 36), dtype=np.uint8)
        b[:, :4] = (np.log2(s / 3) + 7).astype(int) * 8 + rng.integers(0, 8, (n, 4))
    elif t in (T.IQ4_XS, T.IQ3_XXS, T.Q3_K):  # random codes and scales are all valid; d f16, last in Q3_K
        size, at, spread = {T.IQ4_XS: (136, 0, 1100), T.IQ3_XXS: (98, 0, 130), T.Q3_K: (110, 108, 42)}[t]
        b = rng.integers(0, 256, (n, size), dtype=np.uint8)
        b[:, at:at + 2] = f16(np.full(n, s / spread)).reshape(n, 2)
    else: raise SystemExit(f"no pool for {t}")
    POOL[key] = b
    return b

def tensor(t, n_out, n_in):
    blk, size = gguf.GGML_QUANT_SIZES[t]
    if t in FLOATS: blk, size = 16, 16 * size
    total = n_out * n_in // blk
    pool = block_bytes(t, n_in)
    off = int(rng.integers(0, len(pool)))
    idx_rep = -(-(total + off) // len(pool))
    flat = np.tile(pool, (idx_rep, 1))[off:off + total]
    return flat.reshape(n_out, n_in // blk * size)

w = gguf.GGUFWriter(a.out, "muse-glimmer")
w.add_name(f"synthetic muse-glimmer {a.layers}L {a.quant}")
w.add_block_count(a.layers); w.add_context_length(131072); w.add_embedding_length(a.embd)
w.add_feed_forward_length(a.ff); w.add_head_count(a.heads); w.add_head_count_kv(a.kv)
w.add_key_length(HD); w.add_value_length(HD); w.add_rope_dimension_count(HD)
w.add_rope_freq_base(500000.0); w.add_layer_norm_rms_eps(1e-5)
w.add_vocab_size(a.vocab); w.add_tokenizer_model("none")
w.add_final_logit_softcapping(20.0); w.add_logit_scale(1 / np.sqrt(a.embd / 256))
w.add_sliding_window(2048)
w.add_sliding_window_pattern([(a.layers - 1 - i) % 4 != 0 for i in range(a.layers)])

def more_bits(i): n = a.layers; return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2
base = T[a.quant.removesuffix("_m").upper()]
def pick(name, i):
    if a.quant.endswith("_m") and (name in ("ffn_down", "attn_v") and more_bits(i) or name == "output"): return T.Q6_K
    return base
def add(name, t, n_out, n_in):
    d = tensor(t, n_out, n_in)
    if t in (T.F16, T.F32): w.add_tensor(name, d.view(np.float16 if t == T.F16 else np.float32).reshape(n_out, n_in))
    else: w.add_tensor(name, d, raw_dtype=t)
ones = lambda n: np.ones(n, dtype=np.float32)
add("token_embd.weight", base, a.vocab, a.embd)
for i in range(a.layers):
    b = f"blk.{i}."
    q, kv = a.heads * HD, a.kv * HD
    for nm, o, n in (("attn_q", q, a.embd), ("attn_k", kv, a.embd), ("attn_v", kv, a.embd), ("attn_gate", q, a.embd),
                     ("attn_output", a.embd, q), ("ffn_gate", a.ff, a.embd), ("ffn_up", a.ff, a.embd), ("ffn_down", a.embd, a.ff)):
        add(b + nm + ".weight", pick(nm, i), o, n)
    for nm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"): w.add_tensor(b + nm + ".weight", ones(a.embd))
    w.add_tensor(b + "attn_q_norm.weight", ones(HD) * np.float32(3.87)); w.add_tensor(b + "attn_k_norm.weight", ones(HD))
w.add_tensor("output_norm.weight", ones(a.embd))
add("output.weight", pick("output", 0), a.vocab, a.embd)
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(progress=False); w.close()
print("wrote", a.out)
