//! Our check of safetensors headers and the crate `safetensors` accept and refuse the same headers.

use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::json;

use crate::fixture::{Fixture, split_header, with_header};

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..Default::default() })]

    #[test]
    fn agrees_with_the_crate(tensor in any::<prop::sample::Index>(), field in 0..3usize, to in 0..4u64, extra in -3..3i64) {
        let dir = Fixture::new("BF16", true).write();
        let (mut header, mut data) = split_header(&dir.get("model.safetensors"));
        let names: Vec<String> = header.as_object().unwrap().keys().cloned().collect();
        let entry = &mut header[tensor.get(&names)];
        let (field, place) = [("shape", 0), ("data_offsets", 0), ("data_offsets", 1)][field];
        let old = entry[field][place].as_u64().unwrap();
        // `to` 0 leaves the header true, and so does damage that undoes itself.
        entry[field][place] = json!([old, old + 2, old.saturating_sub(2), 0][to as usize]);
        data.resize((data.len() as i64 + extra.min(1)).max(0) as usize, 0);
        let file = with_header(&header, &data);
        dir.put("model.safetensors", &file);

        let ours = dir.open();
        match SafeTensors::deserialize(&file) {
            // A true header may still have a shape that the config does not call for.
            Ok(theirs) => match ours {
                Ok(checkpoint) => for tensor in checkpoint.tensors() {
                    prop_assert_eq!(tensor.data, theirs.tensor(tensor.name).unwrap().data());
                },
                Err(error) => prop_assert!(matches!(error, model::Error::Shape { .. }), "{}", error),
            },
            Err(theirs) => prop_assert!(ours.is_err(), "they say {}", theirs),
        }
    }
}
