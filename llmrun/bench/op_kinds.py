"""What each op of the CPU engine's plan is called in a profile. Ops that do the same have one name."""

from __future__ import annotations

from llmrun.plan import ops

QUANTIZE = "quantize"  # a linear op's input, made int8
KIND_OF: dict[type[ops.Op], str] = {
    ops.Embed: "embed",
    ops.RmsNorm: "rmsnorm",
    ops.Linear: "linear",
    ops.HeadLinear: "head linear",
    ops.RopeStore: "rope",
    ops.Rotate: "rope",
    ops.Attention: "attention",
    ops.Gated: "gate",
    ops.LayerNorm: "layernorm",
    ops.HeadNorm: "head norm",
    ops.Bias: "bias",
    ops.Add: "add",
    ops.AddGated: "add",
    ops.Scale: "scale",
    ops.Columns: "columns",
    ops.Join: "join",
    ops.Activate: "activation",
    ops.Convolve: "convolution",
    ops.Route: "route",
    ops.ExpertLinear: "experts",
    ops.ExpertBias: "bias",
    ops.Combine: "combine",
    ops.SoftCap: "soft cap",
}
