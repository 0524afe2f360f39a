"""Plain eager PyTorch in the manner of the official modelling code.

One linear a weight, a loop over the experts that received tokens, expanded keys and values in the cache. The official
code needs Triton kernels for KDA and cannot run on a CPU: here prefill takes 16 tokens at a time, decode one. MXFP4
experts are decoded when they are loaded.
"""

import json
from pathlib import Path
from typing import Any

import protocol
import torch
from safetensors.torch import load_file
from torch.nn import functional

CHUNK = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
BYTE = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], dim=-1)
"""Both values of each packed byte, low nibble first."""

Cache = dict[str, Any]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rounded before the weight, as the official code does."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length one."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """KDA over whole prompts: [rows, tokens, heads, dim] float32; returns the outputs and the last state."""
    rows, tokens, heads, dim = q.shape
    missing = -tokens % CHUNK
    if missing:
        q, k, v, g, beta = (functional.pad(x, [0] * (2 * x.dim() - 4) + [0, missing]) for x in (q, k, v, g, beta))
    chunks = (tokens + missing) // CHUNK
    q, k, v, g = (x.view(rows, chunks, CHUNK, heads, dim).transpose(2, 3) for x in (q, k, v, g))
    beta = beta.view(rows, chunks, CHUNK, heads).transpose(2, 3)[..., None]
    total = g.cumsum(-2)
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    between = (total[..., :, None, :] - total[..., None, :, :]).masked_fill_(~earlier[..., None], -1e30)
    decayed = torch.exp(between) * k[..., None, :, :]
    overlaps = (decayed @ (k * beta)[..., None])[..., 0].tril(-1)
    reads = (decayed @ q[..., None])[..., 0]
    right = torch.cat([v * beta, k * total.exp() * beta], -1)
    solved = torch.linalg.solve_triangular(overlaps + torch.eye(CHUNK), right, upper=False, unitriangular=True)
    values, keys = solved.split(dim, -1)
    queries, late = q * total.exp(), k * (total[..., -1:, :] - total).exp()
    last, out = total[..., -1, :].exp()[..., None], torch.empty_like(q)
    for index in range(chunks):
        writes = values[:, index] - keys[:, index] @ state
        out[:, index] = queries[:, index] @ state + reads[:, index] @ writes
        state = last[:, index] * state + late[:, index].transpose(-1, -2) @ writes
    return out.transpose(2, 3).reshape(rows, chunks * CHUNK, heads, dim)[:, :tokens], state


class Torch:
    """The text model over a dict of tensors."""

    versions = f"torch {torch.__version__}"

    def __init__(self, dtype: str) -> None:
        self.name, self.dtype = f"torch eager {dtype}", getattr(torch, dtype)

    def load(self, checkpoint: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        folder, prefix = Path(checkpoint), "language_model."
        self.config = json.loads((folder / "config.json").read_text())["text_config"]
        self.vocab = self.config["vocab_size"]
        self.kda_layers = set(self.config["linear_attn_config"]["kda_layers"])
        raw: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            raw.update(load_file(file))
        self.weights = {}
        for full, tensor in raw.items():
            name = full.removeprefix(prefix)
            if name.endswith("_packed"):
                scale = torch.exp2(raw[full.removesuffix("packed") + "scale"].float() - 127)
                values = BYTE.index_select(0, tensor.view(-1).int()).view(tensor.shape[0], -1, 32)
                whole = (values * scale[..., None]).view(tensor.shape[0], -1)
                self.weights[name.removesuffix("_packed")] = whole.to(self.dtype)
            elif not name.endswith("_scale"):
                self.weights[name] = tensor if tensor.dtype == torch.float32 else tensor.to(self.dtype)
        self.prefill([1])

    def prefill(self, ids: list[int]) -> int:
        return self.start([ids])[0]

    def start(self, prompts: list[list[int]]) -> list[int]:
        self.cache = [self._fresh(layer, len(prompts)) for layer in range(self.config["num_hidden_layers"])]
        return self._forward(torch.tensor(prompts))

    def step(self, tokens: list[int]) -> list[int]:
        return self._forward(torch.tensor(tokens)[:, None])

    def _fresh(self, layer: int, rows: int) -> Cache:
        sizes = self.config["linear_attn_config"]
        heads, dim = sizes["num_heads"], sizes["head_dim"]
        if layer + 1 not in self.kda_layers:
            return {}
        tails = {name: torch.zeros(rows, heads * dim, 3) for name in "qkv"}
        return {**tails, "state": torch.zeros(rows, heads, dim, dim)}

    def _forward(self, ids: torch.Tensor) -> list[int]:
        config, eps = self.config, self.config["rms_norm_eps"]
        blocks: list[torch.Tensor] = []
        total = functional.embedding(ids, self.weights["model.embed_tokens.weight"])
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            x = self._mix(blocks, total, name + "self_attention_res") if blocks else total
            starts = layer % config["attn_res_block_size"] == 0
            if starts:
                blocks = [*blocks, total]
            x = rms_norm(x, self.weights[name + "input_layernorm.weight"], eps)
            attend = self._kda if layer + 1 in self.kda_layers else self._mla
            y = attend(x, name + "self_attn.", self.cache[layer])
            total = y if starts else total + y
            x = rms_norm(
                self._mix(blocks, total, name + "mlp_res"), self.weights[name + "post_attention_layernorm.weight"], eps
            )
            dense = name + "mlp.gate_proj.weight" in self.weights
            total = total + (self._gated(x, name + "mlp.") if dense else self._moe(x, name + "block_sparse_moe."))
        total, blocks = total[:, -1:], [block[:, -1:] for block in blocks]
        hidden = rms_norm(self._mix(blocks, total, "model.output_attn_res"), self.weights["model.norm.weight"], eps)
        return self._project(hidden, "lm_head")[:, -1].argmax(-1).tolist()

    def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.weights[name + ".weight"])

    def _gated(self, x: Any, name: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Any:
        a, b = self._project(x, name + gate).float(), self._project(x, name + up).float()
        beta, linear = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        inner = beta * torch.tanh(a / beta) * torch.sigmoid(a) * linear * torch.tanh(b / linear)
        return self._project(inner.to(x.dtype), name + down)

    def _mix(self, blocks: list[torch.Tensor], total: torch.Tensor, name: str) -> torch.Tensor:
        sources = torch.stack([*blocks, total]).float()
        keys = sources * torch.rsqrt(sources.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        query = self.weights[name + "_norm.weight"].float() * self.weights[name + "_proj.weight"][0].float()
        return ((keys * query).sum(-1).softmax(0)[..., None] * sources).sum(0).to(total.dtype)

    def _kda(self, x: torch.Tensor, name: str, cache: Cache) -> torch.Tensor:
        sizes, (rows, tokens, _) = self.config["linear_attn_config"], x.shape
        heads, dim = sizes["num_heads"], sizes["head_dim"]
        by_head, streams = (rows, tokens, heads, dim), []
        for stream in "qkv":
            new = self._project(x, f"{name}{stream}_proj").float().transpose(1, 2)
            seen = torch.cat([cache[stream], new], -1)
            cache[stream] = seen[..., -3:]
            taps = self.weights[f"{name}{stream}_conv1d.weight"]
            mixed = functional.silu(functional.conv1d(seen, taps, groups=heads * dim))
            streams.append(mixed.transpose(1, 2).reshape(by_head))
        q, k, v = streams
        decay = self._project(self._project(x, name + "f_a_proj"), name + "f_b_proj").float().view(by_head)
        slope, bias = self.weights[name + "A_log"].view(-1)[:heads].exp(), self.weights[name + "dt_bias"]
        g = sizes["gate_lower_bound"] * torch.sigmoid(slope[:, None] * (decay + bias.view(heads, dim)))
        beta = torch.sigmoid(self._project(x, name + "b_proj").float())
        q, k = unit(q) * dim**-0.5, unit(k)
        if tokens == 1:
            state = cache["state"] * g[:, 0].exp()[..., None]
            error = (v[:, 0] - (k[:, 0, :, None] @ state)[..., 0, :]) * beta[:, 0, :, None]
            cache["state"] = state + k[:, 0, :, :, None] * error[..., None, :]
            out = (q[:, 0, :, None] @ cache["state"])[..., 0, :][:, None]
        else:
            out, cache["state"] = delta_rule(q, k, v, g, beta, cache["state"])
        gate = torch.sigmoid(self._project(x, name + "g_proj").float()).view(by_head)
        out = rms_norm(out, self.weights[name + "o_norm.weight"], self.config["rms_norm_eps"]) * gate
        return self._project(out.reshape(rows, tokens, heads * dim).to(x.dtype), name + "o_proj")

    def _mla(self, x: torch.Tensor, name: str, cache: Cache) -> torch.Tensor:
        config, (rows, tokens, _) = self.config, x.shape
        heads, nope, value = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
        latent, shared = config["kv_lora_rank"], config["qk_rope_head_dim"]
        by_head = (rows, tokens, heads, -1)
        small = rms_norm(self._project(x, name + "q_a_proj"), self.weights[name + "q_a_layernorm.weight"], 1e-6)
        q = self._project(small, name + "q_b_proj").view(by_head).transpose(1, 2)
        row, key = self._project(x, name + "kv_a_proj_with_mqa").split([latent, shared], -1)
        row = rms_norm(row, self.weights[name + "kv_a_layernorm.weight"], 1e-6)
        expanded = self._project(row, name + "kv_b_proj").view(by_head).transpose(1, 2)
        k = torch.cat([expanded[..., :nope], key[:, None].expand(-1, heads, -1, -1)], -1)
        v = expanded[..., nope:]
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache["k"], cache["v"] = k, v
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1)
        out = out.transpose(1, 2).reshape(rows, tokens, heads * value)
        return self._project(out * torch.sigmoid(self._project(x, name + "g_proj")), name + "o_proj")

    def _moe(self, x: torch.Tensor, name: str) -> torch.Tensor:
        config, shape = self.config, x.shape
        x = x.reshape(-1, shape[-1])
        scores = torch.sigmoid(functional.linear(x.float(), self.weights[name + "gate.weight"].float()))
        biased = scores + self.weights[name + "gate.e_score_correction_bias"]
        ids = torch.topk(biased, config["num_experts_per_token"], -1).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config["routed_scaling_factor"]
        latent = self._project(x, name + "routed_expert_down_proj")
        order = ids.view(-1).argsort()
        sorted_rows, start = latent[order // ids.shape[1]], 0
        out = torch.empty_like(sorted_rows)
        counts = torch.bincount(ids.view(-1), minlength=config["num_experts"]).tolist()
        for expert, count in enumerate(counts):
            if count:
                mine = slice(start, start + count)
                out[mine] = self._gated(sorted_rows[mine], f"{name}experts.{expert}.", "w1", "w3", "w2")
                start += count
        by_pair = torch.empty_like(out)
        by_pair[order] = out
        routed = (by_pair.view(*ids.shape, -1).float() * weights[..., None]).sum(1).to(x.dtype)
        routed = rms_norm(routed, self.weights[name + "routed_expert_norm.weight"], config["rms_norm_eps"])
        up = self._project(routed, name + "routed_expert_up_proj")
        return (up + self._gated(x, name + "shared_experts.")).view(shape)


if __name__ == "__main__":
    arguments = protocol.parser().parse_args()
    protocol.run(Torch(arguments.dtype), arguments)
