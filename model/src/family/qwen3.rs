//! Dense Qwen3: a norm of each head of queries and keys, and no biases.

use super::{Family, Fields};
use crate::Error;
use crate::plan::Traits;

pub(super) static QWEN3: Family = Family {
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    published: "Qwen3-0.6B to Qwen3-32B",
    max_position_embeddings: 32_768,
    head_dim: Some(128),
    read,
};

fn read(fields: &Fields<'_>) -> Result<Traits, Error> {
    fields.refuse("attention_bias", "no published Qwen3 has it; use a checkpoint without attention biases")?;
    fields.refuse_windows()?;
    Ok(Traits { head_norm: true, qkv_bias: false })
}
