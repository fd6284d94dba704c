"""Compare with Liger: its functions in Liger's signatures, Liger's own tests run with ours, and times of both."""

#: ops of ours that stand for a function of Liger's; a test holds it against the table of functions
OPS = (
    "add_rmsnorm", "attention_residual", "cpo", "cross_entropy", "dpo", "dyt", "embedding", "geglu", "groupnorm", "grpo", "jsd", "kl_divergence", "kto",
    "layernorm", "linear_cross_entropy", "linear_jsd", "mix_streams", "modulated_rmsnorm", "multi_token_attention", "multimodal_rope", "orpo",
    "partial_rope", "polynorm", "relu_squared", "rmsnorm", "rope", "simpo", "softmax", "sparsemax", "swiglu", "tvd",
)  # fmt: skip
