//! What `config.json` may say about the rotary embedding, compared with what transformers 5.23 makes of the same file.

use model::rope::{Llama3, Scaling, Yarn};
use model::{Config, Error};
use serde_json::{Value, json};

use crate::fixture::Fixture;

/// The config with `fields` in place of the fixture's rotation.
fn parse(fields: &Value) -> Result<Config, Error> {
    let mut config = Fixture::new("F32", true).config;
    let object = config.as_object_mut().unwrap();
    object.remove("rope_theta");
    object.remove("rope_scaling");
    object.extend(fields.as_object().unwrap().clone());
    Config::parse(config.to_string().as_bytes(), "config.json".as_ref())
}

fn yarn(factor: f64, original_positions: usize) -> Option<Scaling> {
    Some(Scaling::Yarn(Yarn {
        factor,
        original_positions,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: Yarn::length(factor, 1.0),
        truncate: true,
    }))
}

/// The expected values are those of transformers' `Qwen3Config(**config)` and `Qwen3RotaryEmbedding`.
#[test]
fn what_transformers_reads() {
    let card = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let with_theta =
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5e5});
    let plain = json!({"rope_type": "default", "rope_theta": 5e5});
    for (fields, theta, expected) in [
        (json!({}), 1e4, None),
        (json!({"rope_theta": 1e6}), 1e6, None),
        (json!({"rope_parameters": plain}), 5e5, None),
        (json!({"rope_theta": 1e6, "rope_parameters": plain}), 5e5, None),
        // As in Llama 3.1's config.
        (
            json!({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
            5e5,
            Some(Scaling::Llama3(Llama3 {
                factor: 8.0,
                original_positions: 8192,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
            })),
        ),
        // The base inside `rope_scaling`, with and without a base in the config itself.
        (json!({"rope_scaling": with_theta}), 5e5, yarn(4.0, 64)),
        (json!({"rope_theta": 1e6, "rope_scaling": with_theta}), 5e5, yarn(4.0, 64)),
        (json!({"rope_scaling": plain}), 5e5, None),
        (json!({"rope_theta": 1e6, "rope_scaling": card}), 1e6, yarn(4.0, 64)),
        (json!({"rope_scaling": card}), 1e4, yarn(4.0, 64)),
        // The original positions in the config itself, or not given.
        (
            json!({"rope_theta": 1e6, "original_max_position_embeddings": 128, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
            1e6,
            yarn(4.0, 128),
        ),
        (json!({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}), 1e6, yarn(4.0, 256)),
        (json!({"rope_theta": 1e6, "original_max_position_embeddings": 128}), 1e6, None),
        // `rope_scaling` takes precedence. Nothing is lost if `rope_parameters` is unscaled and has the same base.
        (json!({"rope_theta": 5e5, "rope_scaling": card, "rope_parameters": plain}), 5e5, yarn(4.0, 64)),
        (json!({"rope_scaling": with_theta, "rope_parameters": plain}), 5e5, yarn(4.0, 64)),
        (json!({"rope_scaling": with_theta, "rope_parameters": with_theta}), 5e5, yarn(4.0, 64)),
        (json!({"rope_scaling": {}, "rope_parameters": plain}), 5e5, None),
        (json!({"rope_scaling": null, "rope_parameters": with_theta}), 5e5, yarn(4.0, 64)),
        // A factor of null is derived from the positions.
        (
            json!({"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": null, "original_max_position_embeddings": 64}}),
            1e6,
            yarn(4.0, 64),
        ),
    ] {
        let config = parse(&fields).unwrap_or_else(|error| panic!("{fields}: {error}"));
        assert_eq!((config.rope_theta, config.rope_scaling), (theta, expected), "{fields}");
    }
}

#[test]
fn what_contradicts_itself_or_is_not_understood_is_refused() {
    let card = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let plain = json!({"rope_type": "default", "rope_theta": 5e5});
    let with = |key: &str, value: Value| {
        let mut card = card.clone();
        card[key] = value;
        card
    };
    for (fields, part) in [
        // transformers would use base 10,000 for the first, and no YaRN for the second.
        (json!({"rope_scaling": card, "rope_parameters": plain}), "rope_parameters"),
        (json!({"rope_scaling": {"type": "default", "rope_theta": 1e6}, "rope_parameters": card}), "rope_parameters"),
        (json!({"original_max_position_embeddings": 128, "rope_scaling": card}), "original_max_position_embeddings"),
        (json!({"rope_parameters": {"full_attention": card}}), "each type of layer"),
        (json!({"rope_parameters": with("full_attention", card.clone())}), "each type of layer"),
        (json!({"rope_scaling": with("type", json!("linear"))}), "rope_type and its type"),
        (json!({"rope_scaling": with("high_freq_factor", json!(4.0))}), "high_freq_factor"),
        (json!({"rope_parameters": {"rope_type": "default", "factor": 4.0}}), "factor"),
        (json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}), "turns all of a head"),
        (json!({"partial_rotary_factor": 0.5}), "turns all of a head"),
        (json!({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}}), "`factor`"),
        (json!({"rope_scaling": with("truncate", json!(1))}), "truncate"),
        (json!({"rope_scaling": with("original_max_position_embeddings", json!(64.5))}), "whole number"),
        (json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}), "high_freq_factor"),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}),
            "below its",
        ),
        (json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "beta_fast": 32}}), "beta_fast"),
        (json!({"rope_scaling": "yarn"}), "object"),
        (json!({"rope_theta": null}), "rope_theta"),
    ] {
        let error = parse(&fields).expect_err(&fields.to_string()).to_string();
        assert!(error.contains(part) && error.contains("config.json"), "{fields}: {error}");
    }
}

/// Leaving a model's scaling away makes another model of it.
#[test]
fn nobody_is_told_to_remove_a_scaling() {
    for kind in ["linear", "dynamic", "longrope", "su"] {
        let error = parse(&json!({"rope_scaling": {"rope_type": kind, "factor": 4.0}})).unwrap_err().to_string();
        assert!(!error.contains("remove") && error.contains("use a checkpoint"), "{error}");
    }
}
