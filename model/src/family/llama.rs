//! Llama from its third version on: neither norms of heads nor biases. (The tokenizers of earlier ones are not
//! byte-level.)

use super::{Family, Fields};
use crate::Error;
use crate::plan::Traits;

pub(super) static LLAMA: Family = Family {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    published: "Llama-3-8B to Llama-3.3-70B",
    max_position_embeddings: 2048,
    head_dim: None,
    read,
};

fn read(fields: &Fields<'_>) -> Result<Traits, Error> {
    // Unlike in Qwen2, this would give the output projection a bias too.
    fields.refuse("attention_bias", "no published Llama has it; use a checkpoint without attention biases")?;
    fields.refuse("mlp_bias", "no published Llama has it; use a checkpoint without biases in the feed-forward")?;
    fields.refuse_windows()?;
    Ok(Traits { head_norm: false, qkv_bias: false })
}
