//! Numbers that leave f32's range on the way are reported by name, and never give a token.

use model::{CpuModel, Error, Fault, KvPages, Row};

use crate::fixture::Fixture;

/// A fixture in which all of `tensor` is 3e38, which is finite in itself.
fn with_huge(tensor: &str, tied: bool) -> Fixture {
    let mut fixture = Fixture::new("F32", tied);
    let stored = fixture.tensors().get_mut(tensor).unwrap();
    for element in stored.data.chunks_exact_mut(4) {
        element.copy_from_slice(&3e38f32.to_le_bytes());
    }
    fixture
}

#[test]
fn the_first_layer_that_is_not_finite_is_named_or_the_logits() {
    for (tensor, what) in [
        ("model.layers.0.mlp.down_proj.weight", "layer 0"),
        ("model.layers.1.self_attn.o_proj.weight", "layer 1"),
        ("model.layers.1.self_attn.v_proj.weight", "layer 1"),
        ("lm_head.weight", "logits"),
    ] {
        let checkpoint = with_huge(tensor, false).open();
        let model = CpuModel::new(&checkpoint).unwrap();
        let mut cache = model.new_cache(80);
        let mut logits = vec![0.0; checkpoint.config.vocab_size];
        let tokens: Vec<u32> = (0..70).collect();
        let error = model.forward(&tokens, &mut cache, 1, &mut logits).unwrap_err();
        // A row whose last layer nobody needs does not fail. Logits count as those of the next token.
        let first = match what {
            "logits" => 70,
            "layer 1" => 69,
            _ => 0,
        };
        match &error {
            Error::OutputNotFinite { what: found, position } => {
                assert!(found.contains(what), "{found}");
                assert_eq!(*position, first);
            }
            other => panic!("{other:?}"),
        }
        assert!(error.to_string().contains(what) && !error.to_string().contains('\n'));
        assert_eq!(cache.len(), 0);
    }
}

/// Other rows go on: a token whose embedding leads out of range spoils its own sequence alone.
#[test]
fn a_row_that_is_not_finite_is_of_its_own_sequence() {
    let mut fixture = Fixture::new("F32", false);
    let hidden = 48;
    let mut set = |tensor: &str, value: f32, which: &dyn Fn(usize) -> bool| {
        let data = &mut fixture.tensors().get_mut(tensor).unwrap().data;
        let chosen = data.chunks_exact_mut(4).enumerate().filter(|(i, _)| which(*i));
        chosen.for_each(|(_, element)| element.copy_from_slice(&value.to_le_bytes()));
    };
    // Only token 7 has a feature 0, up to the first MLP, which multiplies it by 3e38.
    set("model.embed_tokens.weight", 0.0, &|i| i % hidden == 0 && i / hidden != 7);
    set("model.embed_tokens.weight", 9.0, &|i| i == 7 * hidden);
    set("model.layers.0.self_attn.o_proj.weight", 0.0, &|i| i < 64);
    set("model.layers.0.post_attention_layernorm.weight", 1.0, &|_| true);
    set("model.layers.0.mlp.up_proj.weight", 3e38, &|i| i % hidden == 0);
    let checkpoint = fixture.open();
    let model = CpuModel::new(&checkpoint).unwrap();
    let vocab = checkpoint.config.vocab_size;
    let alone = |tokens: &[u32]| {
        let mut logits = vec![0.0; vocab];
        model.forward(tokens, &mut model.new_cache(8), 1, &mut logits).map(|()| logits)
    };
    let expected = alone(&[1, 2]).unwrap();

    let mut pages = KvPages::new(&checkpoint.config, 2, 8);
    let row = |token, position, pages, logits| Row { token, position, pages, logits };
    let rows = [row(1, 0, &[0], false), row(2, 1, &[0], true), row(1, 0, &[1], false), row(7, 1, &[1], true)];
    let mut logits = vec![0.0; 2 * vocab];
    let faults = model.forward_rows(&rows, &mut pages, &mut logits, None).unwrap();
    assert_eq!(&logits[..vocab], &expected[..]);
    match (&faults[..], alone(&[1, 7])) {
        ([Fault { row: 3, position: 1, place }], Err(Error::OutputNotFinite { what, position: 1 })) => {
            assert_eq!(place.to_string(), what);
        }
        other => panic!("{other:?}"),
    }
}
