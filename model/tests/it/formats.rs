//! Quantised checkpoints: every format is read as its definition says, and errors name what is wrong.

use half::{bf16, f16};
use model::format::e4m3;
use model::{Checkpoint, CpuModel, Error, OpenOptions, WeightsMode};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::fixture::{Dir, Fixture, Stored, encode};

/// Inputs that share a scale.
const GROUP: usize = 8;
/// The layers of a block, with outputs and inputs. 200 outputs are more than any format reads together.
const LAYERS: [(&str, usize, usize); 7] = [
    ("self_attn.q_proj", 64, 48),
    ("self_attn.k_proj", 32, 48),
    ("self_attn.v_proj", 32, 48),
    ("self_attn.o_proj", 48, 64),
    ("mlp.gate_proj", 200, 48),
    ("mlp.up_proj", 200, 48),
    ("mlp.down_proj", 48, 200),
];

/// Every format, by a name for the test.
const FORMATS: [&str; 8] =
    ["fp8 blocks", "fp8 channels", "fp8 tensor", "awq", "gptq", "gptq listed", "packed", "packed with zeros"];

/// A checkpoint whose layers are quantised.
struct Quantized {
    fixture: Fixture,
    /// The same checkpoint with the weights that the codes stand for.
    plain: Fixture,
}

/// The next of a series of random numbers below `n`.
fn below(seed: &mut u64, n: u64) -> u64 {
    *seed += 1;
    model::sampling::random(11, *seed) % n
}

/// Packs eight nibbles in a word, the first lowest.
fn words(nibbles: impl IntoIterator<Item = u8>) -> Vec<u8> {
    let nibbles: Vec<u8> = nibbles.into_iter().collect();
    nibbles.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect()
}

fn stored(dtype: &'static str, shape: &[usize], data: Vec<u8>) -> Stored {
    Stored { dtype, shape: shape.to_vec(), data }
}

fn floats(dtype: &'static str, shape: &[usize], values: impl IntoIterator<Item = f32>) -> Stored {
    stored(dtype, shape, values.into_iter().flat_map(|x| encode(dtype, x)).collect())
}

/// Two objects in one.
fn merged(mut a: Value, b: Value) -> Value {
    a.as_object_mut().unwrap().extend(b.as_object().unwrap().clone());
    a
}

fn config_of(format: &str) -> Value {
    let compressed = |format: &str, weights: Value| {
        json!({"quant_method": "compressed-tensors", "format": format,
               "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
    };
    let int4 = |symmetric: bool| {
        let group = json!({"num_bits": 4, "type": "int", "symmetric": symmetric});
        merged(group, json!({"strategy": "group", "group_size": GROUP}))
    };
    let float = |strategy: &str| json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy});
    match format {
        "fp8 blocks" => json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 16]}),
        "fp8 channels" => compressed("float-quantized", float("channel")),
        "fp8 tensor" => compressed("naive-quantized", float("tensor")),
        "awq" => json!({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": true}),
        "gptq" => json!({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": true, "desc_act": false}),
        "gptq listed" => json!({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": true, "desc_act": true,
                                "checkpoint_format": "gptq_v2"}),
        "packed" => compressed("pack-quantized", int4(true)),
        "packed with zeros" => compressed("pack-quantized", int4(false)),
        other => panic!("{other}"),
    }
}

/// Tensors of a layer by their suffixes, and the weights that they stand for.
fn layer(format: &str, outputs: usize, inputs: usize, seed: &mut u64) -> (Vec<(&'static str, Stored)>, Vec<f32>) {
    let groups = inputs.div_ceil(GROUP);
    let mut scales = |n: usize| -> Vec<f32> {
        // Exact in f16 and bf16, and small enough that activations stay of order one.
        (0..n).map(|_| (below(seed, 100) as f32 + 28.0) / 8192.0).collect()
    };
    if format.starts_with("fp8") {
        let (name, rows, columns) = match format {
            "fp8 blocks" => ("weight_scale_inv", 24, 16),
            "fp8 channels" => ("weight_scale", 1, inputs),
            _ => ("weight_scale", outputs, inputs),
        };
        let (down, across) = (outputs.div_ceil(rows), inputs.div_ceil(columns));
        let scales = scales(down * across);
        let codes: Vec<u8> = (0..outputs * inputs)
            .map(|_| below(seed, 256) as u8 & 0xbf)
            .map(|code| if e4m3::is_nan(code) { 0 } else { code })
            .collect();
        let meant =
            |i: usize| e4m3::VALUES[codes[i] as usize] * scales[i / inputs / rows * across + i % inputs / columns];
        let weights = (0..codes.len()).map(meant).collect();
        let shape: &[usize] = if format == "fp8 tensor" { &[] } else { &[down, across] };
        let scale = floats(if format == "fp8 blocks" { "BF16" } else { "F32" }, shape, scales);
        return (vec![("weight", stored("F8_E4M3", &[outputs, inputs], codes)), (name, scale)], weights);
    }
    let scales = scales(outputs * groups);
    let codes: Vec<u8> = (0..outputs * inputs).map(|_| below(seed, 16) as u8).collect();
    let zeros: Vec<u8> = match format {
        "awq" | "packed with zeros" => (0..outputs * groups).map(|_| below(seed, 16) as u8).collect(),
        _ => vec![8; outputs * groups],
    };
    let shuffled = format == "gptq listed";
    let group_of: Vec<usize> = (0..inputs).map(|i| if shuffled { i * 7 % inputs / GROUP } else { i / GROUP }).collect();
    let meant = |i: usize| {
        let at = i / inputs * groups + group_of[i % inputs];
        (f32::from(codes[i]) - f32::from(zeros[at])) * scales[at]
    };
    let weights = (0..codes.len()).map(meant).collect();
    let by_group = |values: &[f32]| -> Vec<f32> {
        (0..groups * outputs).map(|i| values[i % outputs * groups + i / outputs]).collect()
    };
    let tensors = match format {
        "awq" => {
            const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
            let output = |k: usize| k % outputs / 8 * 8 + ORDER[k % 8];
            let codes = words((0..outputs * inputs).map(|k| codes[output(k) * inputs + k / outputs]));
            let zeros = words((0..outputs * groups).map(|k| zeros[output(k) * groups + k / outputs]));
            vec![
                ("qweight", stored("I32", &[inputs, outputs / 8], codes)),
                ("qzeros", stored("I32", &[groups, outputs / 8], zeros)),
                ("scales", floats("F16", &[groups, outputs], by_group(&scales))),
            ]
        }
        "gptq" | "gptq listed" => {
            // Word (w, o) has inputs 8w to 8w + 7 of output o.
            let code = |k: usize| codes[k / 8 % outputs * inputs + k / 8 / outputs * 8 + k % 8];
            let less = if format == "gptq" { 1 } else { 0 };
            let zeros = words((0..outputs * groups).map(|k| zeros[k % outputs * groups + k / outputs] - less));
            let list = group_of.iter().flat_map(|&group| (group as i32).to_le_bytes()).collect();
            vec![
                ("qweight", stored("I32", &[inputs / 8, outputs], words((0..outputs * inputs).map(code)))),
                ("qzeros", stored("I32", &[groups, outputs / 8], zeros)),
                ("scales", floats("F16", &[groups, outputs], by_group(&scales))),
                ("g_idx", stored("I32", &[inputs], list)),
            ]
        }
        _ => {
            let sizes = [outputs, inputs].iter().flat_map(|&size| (size as i64).to_le_bytes()).collect();
            let mut tensors = vec![
                ("weight_packed", stored("I32", &[outputs, inputs / 8], words(codes))),
                ("weight_scale", floats("BF16", &[outputs, groups], scales)),
                ("weight_shape", stored("I64", &[2], sizes)),
            ];
            if format == "packed with zeros" {
                // Word (w, g) has outputs 8w to 8w + 7 of group g.
                let zero = |k: usize| zeros[(k / 8 / groups * 8 + k % 8) * groups + k / 8 % groups];
                let zeros = words((0..outputs * groups).map(zero));
                tensors.push(("weight_zero_point", stored("I32", &[outputs / 8, groups], zeros)));
            }
            tensors
        }
    };
    (tensors, weights)
}

fn quantized(format: &str) -> Quantized {
    let mut plain = Fixture::new("BF16", true);
    plain.config["intermediate_size"] = json!(200);
    let mut fixture = plain.clone();
    fixture.config["quantization_config"] = config_of(format);
    let mut seed = 5;
    for block in 0..2 {
        for (name, outputs, inputs) in LAYERS {
            let prefix = format!("model.layers.{block}.{name}");
            let (tensors, weights) = layer(format, outputs, inputs, &mut seed);
            fixture.tensors().remove(&format!("{prefix}.weight"));
            for (suffix, tensor) in tensors {
                fixture.tensors().insert(format!("{prefix}.{suffix}"), tensor);
            }
            plain.tensors().insert(format!("{prefix}.weight"), floats("BF16", &[outputs, inputs], weights));
        }
    }
    Quantized { fixture, plain }
}

/// Every matrix of the layers as bf16.
fn matrices(checkpoint: &Checkpoint) -> Vec<Vec<u8>> {
    let weights = checkpoint.weights().unwrap();
    let layers = weights.layers.iter();
    let all = layers.flat_map(|l| [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down]);
    all.map(|weight| {
        let mut out = vec![0; 2 * weight.elements()];
        weight.read_bf16(0, &mut out).unwrap();
        out
    })
    .collect()
}

fn logits(checkpoint: &Checkpoint) -> Vec<f32> {
    let model = CpuModel::new(checkpoint).unwrap();
    let mut logits = vec![0.0; 3 * 270];
    model.forward(&[3, 77, 140], &mut model.new_cache(3), 3, &mut logits).unwrap();
    logits
}

#[test]
fn every_format_means_what_its_definition_says() {
    for format in FORMATS {
        let Quantized { fixture, plain } = quantized(format);
        let (found, expected) = (fixture.open(), plain.open());
        assert!(matrices(&found) == matrices(&expected), "{format}");
        assert_eq!(logits(&found), logits(&expected), "{format}");
        assert!(
            found.stored_bytes() < expected.stored_bytes() && found.cpu_bytes() == expected.cpu_bytes(),
            "{format}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Pieces may begin and end within a row, within a block of rows, or within a word of packed rows.
    #[test]
    fn any_piece_of_a_matrix_is_that_of_the_whole(
        format in 0..FORMATS.len(),
        ends in prop::collection::vec(0..9600usize, 6),
    ) {
        let checkpoint = quantized(FORMATS[format]).fixture.open();
        let whole = &matrices(&checkpoint)[5];
        let weights = checkpoint.weights().unwrap();
        for pair in ends.chunks(2) {
            let (first, last) = (pair[0].min(pair[1]), pair[0].max(pair[1]));
            let mut out = vec![0; 2 * (last - first)];
            weights.layers[0].up.read_bf16(first, &mut out).unwrap();
            prop_assert!(out == whole[2 * first..2 * last], "{} from {first} to {last}", FORMATS[format]);
        }
    }

    #[test]
    fn so_is_any_piece_of_what_is_rounded(fp8: bool, ends in prop::collection::vec(0..9600usize, 2)) {
        let mut plain = quantized("awq").plain;
        let mode = if fp8 { WeightsMode::Fp8 } else { WeightsMode::Int4 };
        let dir = plain.write();
        let options = OpenOptions { weights: mode, ..OpenOptions::default() };
        let checkpoint = Checkpoint::open_with(dir.path(), options).unwrap();
        let whole = &matrices(&checkpoint)[5];
        let (first, last) = (ends[0].min(ends[1]), ends[0].max(ends[1]));
        let mut out = vec![0; 2 * (last - first)];
        checkpoint.weights().unwrap().layers[0].up.read_bf16(first, &mut out).unwrap();
        prop_assert!(out == whole[2 * first..2 * last], "from {first} to {last}");
        // The result is near the stored weights, but not equal to them.
        let stored = &plain.tensors()["model.layers.0.mlp.up_proj.weight"].data;
        let wide = |bytes: &[u8]| -> Vec<f32> {
            bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
        };
        let (found, stored) = (wide(whole), wide(stored));
        let square: f32 = stored.iter().map(|x| x * x).sum();
        let off = found.iter().zip(&stored).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / square;
        prop_assert!(off > 1e-5 && off.sqrt() < if fp8 { 0.04 } else { 0.13 }, "{}", off.sqrt());
    }
}

#[test]
fn rounding_changes_matrices_alone_and_the_digest() {
    let dir = Fixture::new("F32", false).write();
    let open = |weights| Checkpoint::open_with(dir.path(), OpenOptions { weights, ..OpenOptions::default() }).unwrap();
    let [plain, fp8, int4] = [WeightsMode::Plain, WeightsMode::Fp8, WeightsMode::Int4].map(open);
    assert!(plain.digest() != fp8.digest() && fp8.digest() != int4.digest() && plain.digest() != int4.digest());
    for rounded in [&fp8, &int4] {
        let weights = rounded.weights().unwrap();
        assert!(weights.embed.plain().is_some() && weights.head.plain().is_some() && weights.norm.plain().is_some());
        assert!(weights.layers.iter().all(|l| l.input_norm.plain().is_some() && l.q.plain().is_none()));
    }
}

#[test]
fn what_is_quantised_is_not_quantised_again() {
    let dir = quantized("awq").fixture.write();
    let options = OpenOptions { weights: WeightsMode::Fp8, ..OpenOptions::default() };
    let error = Checkpoint::open_with(dir.path(), options).unwrap_err();
    assert!(matches!(error, Error::AlreadyQuantized { .. }));
    assert!(
        error.to_string().contains("--weights fp8") && error.to_string().contains("AWQ int4, groups of 8"),
        "{error}"
    );
}

/// Some matrices may be left unquantised; the file says which.
#[test]
fn matrices_that_are_not_quantised_stay_so() {
    for format in FORMATS {
        let Quantized { mut fixture, mut plain } = quantized(format);
        const LAYER: &str = "model.layers.1.mlp.down_proj";
        let weight = plain.tensors()[&format!("{LAYER}.weight")].clone();
        fixture.tensors().retain(|name, _| !name.starts_with(LAYER));
        fixture.tensors().insert(format!("{LAYER}.weight"), weight);
        fixture.config["quantization_config"]["modules_to_not_convert"] = json!([LAYER]);
        assert_eq!(logits(&fixture.open()), logits(&plain.open()), "{format}");
    }
}

/// A checkpoint with one tensor of a quantised layer spoiled.
fn spoiled(format: &str, suffix: &str, spoil: impl FnOnce(&mut Stored)) -> Dir {
    let mut fixture = quantized(format).fixture;
    spoil(fixture.tensors().get_mut(&format!("model.layers.1.mlp.up_proj.{suffix}")).unwrap());
    fixture.write()
}

#[test]
fn parts_that_are_missing_or_of_another_shape_are_named() {
    for (format, suffixes) in [
        ("fp8 blocks", vec!["weight", "weight_scale_inv"]),
        ("fp8 channels", vec!["weight", "weight_scale"]),
        ("awq", vec!["qweight", "qzeros", "scales"]),
        ("gptq listed", vec!["qweight", "qzeros", "scales", "g_idx"]),
        ("packed with zeros", vec!["weight_packed", "weight_scale", "weight_zero_point"]),
    ] {
        for suffix in suffixes {
            let name = format!("model.layers.1.mlp.up_proj.{suffix}");
            let mut fixture = quantized(format).fixture;
            let tensor = fixture.tensors().remove(&name).unwrap();
            assert!(matches!(fixture.write().error(&name), Error::MissingTensor { .. }), "{format}");
            let shape = [[3].as_slice(), &tensor.shape].concat();
            let data = tensor.data.repeat(3);
            fixture.tensors().insert(name.clone(), Stored { shape, data, ..tensor.clone() });
            assert!(matches!(fixture.write().error(&name), Error::Shape { .. }), "{format}");
            let elements: usize = tensor.shape.iter().product();
            fixture.tensors().insert(name.clone(), Stored { dtype: "I64", data: vec![0; 8 * elements], ..tensor });
            assert!(matches!(fixture.write().error(&name), Error::WrongDtype { .. }), "{format}");
        }
    }
    // Codes that no config explains.
    let mut fixture = quantized("fp8 blocks").fixture;
    fixture.config["quantization_config"] = Value::Null;
    assert!(matches!(fixture.write().error("weights by themselves"), Error::WrongDtype { .. }));
}

/// They are found when the checkpoint is opened, or else when it is loaded.
#[test]
fn scales_and_codes_that_mean_no_number_are_named() {
    let later = |dir: &Dir| {
        let options = OpenOptions { check_finite: false, ..OpenOptions::default() };
        CpuModel::new(&Checkpoint::open_with(dir.path(), options).unwrap()).unwrap_err()
    };
    for (format, suffix, dtype, at) in [
        ("fp8 blocks", "weight_scale_inv", "BF16", 5),
        ("fp8 channels", "weight_scale", "F32", 5),
        ("fp8 tensor", "weight_scale", "F32", 0),
        ("awq", "scales", "F16", 205),
        ("gptq", "scales", "F16", 205),
        ("gptq listed", "scales", "F16", 205),
        ("packed", "weight_scale", "BF16", 31),
    ] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let dir = spoiled(format, suffix, |scale| {
                let bytes = encode(dtype, value);
                let size = bytes.len();
                scale.data[at * size..][..size].copy_from_slice(&bytes);
            });
            let name = format!("model.layers.1.mlp.up_proj.{suffix}");
            assert!(matches!(dir.error(&name), Error::NotFinite { .. }), "{format}");
            // The error gives the place in the matrix: row and group.
            let (row, group) = match format {
                "fp8 blocks" => (24, 2),
                "fp8 channels" => (5, 0),
                "fp8 tensor" => (0, 0),
                "packed" => (5, 1),
                _ => (5, 1),
            };
            match later(&dir) {
                Error::BadScale { tensor, row: r, group: g, .. } => {
                    assert_eq!((tensor, r, g), (name, row, group), "{format}");
                }
                other => panic!("{format}: {other}"),
            }
        }
    }
    // A scale that is a number, but makes a weight that bf16 cannot hold.
    let dir = spoiled("fp8 channels", "weight_scale", |scale| scale.data[..4].copy_from_slice(&1e36f32.to_le_bytes()));
    assert!(matches!(CpuModel::new(&dir.open().unwrap()).unwrap_err(), Error::BadScale { row: 0, .. }));
    let dir = spoiled("fp8 channels", "weight", |weight| weight.data[1234] = 0xff);
    for error in [dir.error("`model.layers.1.mlp.up_proj.weight`"), later(&dir)] {
        assert!(matches!(error, Error::NotFinite { index: 1234, .. }), "{error}");
    }
    for group in [-1i32, 6] {
        let dir = spoiled("gptq listed", "g_idx", |list| list.data[16..20].copy_from_slice(&group.to_le_bytes()));
        match later(&dir) {
            Error::GroupOutOfRange { tensor, index: 4, value, groups: 6, .. } => {
                assert_eq!((tensor.as_str(), value), ("model.layers.1.mlp.up_proj.g_idx", group));
            }
            other => panic!("{other}"),
        }
    }
}

/// Exporters of GPTQ give every layer a bias. A bias of zeros changes nothing.
#[test]
fn biases_of_zeros_are_passed_over() {
    const BIAS: &str = "model.layers.0.self_attn.o_proj.bias";
    for (format, value, passes) in [("gptq", 0.0, true), ("gptq", 0.5, false), ("awq", 0.0, false)] {
        let Quantized { mut fixture, mut plain } = quantized(format);
        fixture.tensors().insert(BIAS.into(), floats("F16", &[48], [value; 48]));
        if passes {
            assert_eq!(logits(&fixture.open()), logits(&plain.open()));
            plain.tensors().insert(BIAS.into(), floats("F16", &[48], [0.0; 48]));
            plain.write().error(BIAS);
        } else {
            assert!(matches!(fixture.write().error(BIAS), Error::UnexpectedTensor { .. }));
        }
    }
}

/// Formats that are not read are refused; the error names the setting.
#[test]
fn formats_that_are_not_read_are_refused_by_name() {
    let group = |weights: Value, format: &str| {
        json!({"quant_method": "compressed-tensors", "format": format,
               "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
    };
    let int = |bits: u32| json!({"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128});
    for (config, parts) in [
        (json!({"load_in_8bit": true}), ["quantization_config", "load_in_8bit"]),
        (json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), ["quant_method", "bitsandbytes"]),
        (json!({"quant_method": "mxfp4"}), ["quant_method", "mxfp4"]),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), ["quantization_config.fmt", "e5m2"]),
        (json!({"quant_method": "fp8", "scale_fmt": "ue8m0"}), ["scale_fmt", "ue8m0"]),
        (json!({"quant_method": "fp8", "weight_block_size": [0, 128]}), ["weight_block_size", "[0,128]"]),
        (json!({"quant_method": "awq", "bits": 8, "group_size": 128}), ["quantization_config.bits", "8"]),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}), ["version", "gemv"]),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": false}), ["zero_point", "false"]),
        (json!({"quant_method": "awq", "bits": 4}), ["group_size", "null"]),
        (json!({"quant_method": "gptq", "bits": 3, "group_size": 128}), ["quantization_config.bits", "3"]),
        (json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": false}), ["sym", "false"]),
        (
            json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}),
            ["checkpoint_format", "marlin"],
        ),
        (group(int(8), "pack-quantized"), ["config_groups", "int of 8 bits as pack-quantized"]),
        (group(int(4), "marlin-24"), ["config_groups", "marlin-24"]),
        (group(json!({"num_bits": 4, "type": "float"}), "nvfp4-pack-quantized"), ["config_groups", "nvfp4"]),
        (group(Value::Null, "dense"), ["config_groups", "null"]),
        (json!({"quant_method": "compressed-tensors", "config_groups": {}}), ["config_groups", "{}"]),
    ] {
        let mut fixture = Fixture::new("F32", true);
        fixture.config["quantization_config"] = config.clone();
        let dir = fixture.write();
        for part in parts {
            assert!(matches!(dir.error(part), Error::UnsupportedSetting { .. }), "{config}");
        }
        dir.error("use the checkpoint in bf16");
    }
    let mut fixture = Fixture::new("F32", true);
    fixture.config["quantization_config"] = group(json!({"type": "int"}), "pack-quantized");
    assert!(matches!(fixture.write().error("num_bits"), Error::Json { .. }));
    fixture.config["quantization_config"] = Value::Null;
    fixture.open();
}

/// `config.json` as in published checkpoints: what their quantisers write, and all that is beside it.
#[test]
fn official_configs_are_parsed() {
    for (name, json, expected) in [
        ("Qwen3-8B-FP8", include_str!("configs/Qwen3-8B-FP8.json"), "FP8 (e4m3), blocks of 128 × 128"),
        ("Qwen3-8B-AWQ", include_str!("configs/Qwen3-8B-AWQ.json"), "AWQ int4, groups of 128"),
        ("Qwen3-8B-GPTQ-Int4", include_str!("configs/Qwen3-8B-GPTQ-Int4.json"), "GPTQ int4, groups of 128"),
        (
            "Qwen2.5-7B-GPTQ-Int4",
            include_str!("configs/Qwen2.5-7B-Instruct-GPTQ-Int4.json"),
            "GPTQ int4, groups of 128",
        ),
        (
            "Qwen3-8B-quantized.w4a16",
            include_str!("configs/Qwen3-8B-quantized.w4a16.json"),
            "pack-quantized int4, groups of 128",
        ),
        (
            "Qwen3-8B-FP8-dynamic",
            include_str!("configs/Qwen3-8B-FP8-dynamic.json"),
            "FP8 (e4m3), a scale for each output",
        ),
    ] {
        let config = model::Config::parse(json.as_bytes(), name.as_ref()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(config.quantization.unwrap().name(), expected, "{name}");
        assert!(config.plan.hidden >= 3584, "{name}");
    }
}

/// Scales are exact in f16 and bf16, so the test's arithmetic is exact.
#[test]
fn the_scales_of_these_tests_are_exact() {
    for n in 0..100 {
        let scale = (n as f32 + 28.0) / 8192.0;
        assert_eq!((f16::from_f32(scale).to_f32(), bf16::from_f32(scale).to_f32()), (scale, scale));
    }
}
