//! Qwen2 and Qwen2.5: biases on queries, keys and values, whatever the config says, and no norms of heads.

use super::{Family, Fields};
use crate::Error;
use crate::plan::Traits;

pub(super) static QWEN2: Family = Family {
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    published: "Qwen2.5-0.5B to Qwen2.5-72B",
    max_position_embeddings: 32_768,
    head_dim: None,
    read,
};

fn read(fields: &Fields<'_>) -> Result<Traits, Error> {
    fields.refuse_windows()?;
    Ok(Traits { head_norm: false, qkv_bias: true })
}
