//! Checks of shapes and weights: whether the kernels cover a model, and whether weights on a device belong to it.

use gpu_kernels::attention;
use gpu_kernels::kv::HEAD_DIM;
use gpu_kernels::linear;
use gpu_kernels::sample::MOST_VOCAB;
use half::bf16;
use model::Config;
use model::plan::{LayerPlan, Matrix};

use super::Forward;
use crate::Error;
use crate::device::{Buffer, Device};
use crate::lossless::Packed;
use crate::stream::{Stream, n_tiles};
use crate::weights::{Compact, DeviceLayer, DeviceWeights, check_size};

impl Forward {
    /// What [`check`](Self::check) requires, in words.
    pub const COVERED: &'static str = "head size 128, hidden and intermediate size multiples of 128, at most 16 \
                                       query heads for each key-value head, at most 262,144 tokens";

    /// What the sampler requires, in words.
    pub(crate) const VOCABULARY: &'static str = "a vocabulary of at most 262,144 tokens";

    /// Checks that the kernels cover `config`'s shapes.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(config: &Config) -> Result<(), Error> {
        let (plan, attention) = (config.plan, config.plan.attention);
        let (q_heads, kv_heads) = (attention.query_heads, attention.key_value_heads);
        let group = q_heads.checked_div(kv_heads).unwrap_or(0);
        let chunk = 2 * linear::SLICE as usize;
        // Kernels count in 32 bits.
        let largest = config.vocab_size.max(plan.hidden).max(plan.activation_size()).max(attention.qkv_size());
        let is_size = |size: usize| size > 0 && size.is_multiple_of(chunk);
        for (ok, what, found) in [
            (attention.head_dim == HEAD_DIM as usize, "a head size of 128", attention.head_dim),
            (is_size(plan.hidden), "a hidden size that is a multiple of 128", plan.hidden),
            (is_size(plan.activation_size()), "an intermediate size that is a multiple of 128", plan.activation_size()),
            (group > 0 && group * kv_heads == q_heads, "as many query heads for each key-value head", q_heads),
            (group <= attention::PAIRS as usize, "at most 16 query heads for a key-value head", group),
            (config.num_hidden_layers > 0, "a layer", config.num_hidden_layers),
            (config.num_hidden_layers < 1 << 16, "fewer than 65536 layers", config.num_hidden_layers),
            (config.vocab_size > 0, "a vocabulary", config.vocab_size),
            (config.vocab_size <= MOST_VOCAB as usize, Self::VOCABULARY, config.vocab_size),
            (largest < 1 << 30, "sizes below 2^30", largest),
        ] {
            if !ok {
                return Err(Error::Unsupported { what, found });
            }
        }
        Ok(())
    }
}

/// Checks that every weight of `config` is on this card and has the size that kernels assume. The QKV projections read
/// `times` the hidden size.
///
/// # Errors
/// [`Error::Weights`], [`Error::WeightShape`].
pub(super) fn check_weights(
    device: &Device,
    config: &Config,
    weights: &DeviceWeights,
    times: usize,
) -> Result<(), Error> {
    let DeviceWeights { embed, layers, norm, stream, compact, packed_head } = weights;
    let LayerPlan { hidden, attention, .. } = config.plan;
    let head_dim = attention.head_dim;
    let check = |what: &'static str, weight: &Buffer<bf16>, expected: usize| {
        check_size(what, (weight.device(), device), weight.len(), expected)
    };
    let optional = |what, weight: &Option<Buffer<bf16>>, expected: usize| match weight {
        Some(weight) => check(what, weight, expected),
        None if expected == 0 => Ok(()),
        None => Err(Error::Weights { what, found: 0, expected }),
    };
    if layers.len() != config.num_hidden_layers {
        return Err(Error::Weights { what: "layers", found: layers.len(), expected: config.num_hidden_layers });
    }
    check("embedding", embed, config.vocab_size * hidden)?;
    check("final norm", norm, hidden)?;
    check_matrices(device, config, stream, times)?;
    for layer in layers {
        let DeviceLayer { input_norm, qkv_bias, q_norm, k_norm, post_attention_norm } = layer;
        for (what, weight, expected) in [
            ("input norm", input_norm, hidden),
            ("norm of queries", q_norm, head_dim),
            ("norm of keys", k_norm, head_dim),
            ("post-attention norm", post_attention_norm, hidden),
        ] {
            check(what, weight, expected)?;
        }
        let biases = if attention.traits.qkv_bias { attention.qkv_size() } else { 0 };
        optional("bias of the projections", qkv_bias, biases)?;
    }
    if let Some(head) = packed_head {
        let what = "packed head, in chunks,";
        // Where all matrices are packed, kernels would look for them beside the head.
        if matches!(compact, Compact::Packed(_)) {
            return Err(Error::Weights { what, found: head.chunks() as usize, expected: 0 });
        }
        head.check(what, device, Packed::head_sizes(config))?;
    }
    compact.check(device, config, stream)
}

/// Checks that the stream is on this card and that its matrices have the shapes of the plan's. The QKV projections read
/// `times` the hidden size.
///
/// # Errors
/// [`Error::Weights`], [`Error::WeightShape`].
fn check_matrices(device: &Device, config: &Config, stream: &Stream, times: usize) -> Result<(), Error> {
    let on_card = stream.weights().device().is_same_card(device);
    // A head has one more, which makes one hidden state from three.
    let (found, most) = (stream.matrices().len(), config.gemms().count() + usize::from(times > 1));
    if found > most {
        return Err(Error::Weights { what: "list of matrices", found, expected: most });
    }
    for (i, gemm) in config.gemms().enumerate() {
        let what = match gemm.matrix {
            Matrix::Qkv => "projection of queries, keys and values",
            Matrix::Output => "output projection",
            Matrix::GateUp => "gate and up projections",
            Matrix::Down => "down projection",
            Matrix::Head => "head",
        };
        let times = if gemm.matrix == Matrix::Qkv { times } else { 1 };
        let (n_tiles, k) = n_tiles(&gemm);
        let expected = [n_tiles as usize, k as usize * times];
        let matrix = stream.matrices().get(i).filter(|_| on_card);
        let found = matrix.map_or([0, 0], |of| [of.n_tiles as usize, of.k as usize]);
        if found != expected {
            return Err(Error::WeightShape { what, found, expected });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use model::Checkpoint;
    use model::format::Code;

    use super::*;
    use crate::device::DeviceOptions;

    fn small() -> Config {
        let shape = Config::published("0.6B").unwrap();
        resized(&Config { vocab_size: 64, num_hidden_layers: 2, ..shape }, 128, 256, (2, 1))
    }

    fn resized(config: &Config, hidden: usize, intermediate: usize, heads: (usize, usize)) -> Config {
        let mut config = config.clone();
        config.plan.resize(hidden, intermediate, heads);
        config
    }

    /// The error message when weights of config `given` are passed off as those of config `said`.
    fn refused(given: &Config, said: &Config) -> String {
        let device = Device::emulator(0);
        let weights = DeviceWeights::random(given, &device).unwrap();
        Forward::new(&device, said, weights, 16).err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn weights_of_another_model_are_refused() {
        let config = small();
        assert_eq!(refused(&config, &config), "");
        for (other, what) in [
            (Config { vocab_size: 65, ..config.clone() }, "embedding has 8192 elements"),
            (Config { num_hidden_layers: 3, ..config.clone() }, "layers"),
            (resized(&config, 128, 384, (2, 1)), "gate and up projections"),
            (resized(&config, 128, 256, (3, 1)), "projection of queries"),
        ] {
            let error = refused(&config, &other);
            assert!(error.contains(what), "{error}");
        }
        let weights = DeviceWeights::random(&config, &Device::emulator(0)).unwrap();
        let error = Forward::new(&Device::emulator(0), &config, weights, 16).err().unwrap().to_string();
        assert!(error.contains("embedding has 0 elements"), "of another card: {error}");
        // Only the codes are on another card.
        let coded = |device| DeviceWeights::random_as(&config, device, Some(Code::Int4)).unwrap();
        let device = Device::emulator(0);
        let weights = DeviceWeights { compact: coded(&Device::emulator(0)).compact, ..coded(&device) };
        let error = Forward::new(&device, &config, weights, 16).err().unwrap().to_string();
        assert!(error.contains("codes has 0 elements"), "{error}");
    }

    /// Why these weights are refused as those of `config`.
    fn refusal(device: &Device, config: &Config, weights: DeviceWeights) -> String {
        let forward = Forward::new(device, config, weights, 16);
        forward.err().map(|error| error.to_string()).unwrap_or_default()
    }

    /// As many elements are not the same matrix: a kernel would read beyond its end.
    #[test]
    fn a_matrix_of_another_shape_is_refused_whatever_its_size() {
        let (config, device) = (small(), Device::emulator(0));
        let sizes = |turned: Option<usize>, more: Option<(u32, u32)>| {
            let sizes = config
                .gemms()
                .map(|gemm| n_tiles(&gemm))
                .enumerate()
                .map(move |(i, (n_tiles, k))| if turned == Some(i) { (n_tiles / 2, 2 * k) } else { (n_tiles, k) });
            let stream = Stream::new(&device, sizes.chain(more)).unwrap();
            let weights = DeviceWeights { stream, ..DeviceWeights::random(&config, &device).unwrap() };
            refusal(&device, &config, weights)
        };
        assert_eq!(sizes(None, None), "");
        let error = sizes(Some(1), None);
        assert!(error.contains("output projection has 64 rows of 512 inputs there, and 128 of 256"), "{error}");
        let error = sizes(Some(Matrix::Head.number(2)), None);
        assert!(error.contains("head has 32 rows of 256 inputs there, and 64 of 128"), "{error}");
        // Kernels would take the last matrix for the head.
        let error = sizes(None, Some((1, 64)));
        assert!(error.contains("list of matrices has 10 elements there, and 9"), "{error}");
    }

    /// Parts of sets of weights that are fine by themselves.
    #[test]
    fn weights_that_do_not_belong_together_are_refused() {
        let (config, device) = (small(), Device::emulator(0));
        let one_layer = Config { num_hidden_layers: 1, ..config.clone() };
        let coded = |config: &Config, code| DeviceWeights::random_as(config, &device, Some(code)).unwrap();
        // As many chunks, and fewer matrices: a kernel would look for the head's scale beyond the end of the scales.
        let packed_head = coded(&one_layer, Code::Int4).packed_head;
        assert!(packed_head.is_some());
        let weights = DeviceWeights { packed_head, ..coded(&config, Code::Int4) };
        let error = refusal(&device, &config, weights);
        assert!(error.contains("packed head, in chunks,"), "{error}");
        // As many bytes of codes, of other matrices.
        let (config, other) = (resized(&config, 128, 384, (2, 1)), resized(&config, 128, 128, (4, 2)));
        for code in [Code::Int4, Code::E4m3] {
            let (weights, compact) = (coded(&config, code), coded(&other, code).compact);
            assert_eq!(weights.compact.bytes(), compact.bytes(), "{code:?}");
            assert_eq!(refusal(&device, &config, coded(&config, code)), "");
            let error = refusal(&device, &config, DeviceWeights { compact, ..weights });
            assert!(error.contains("codes"), "{error}");
        }
        // bf16 weights of one layer, and nothing to make the others' from.
        let stream = Stream::of_layer(&device, &config).unwrap();
        let weights = DeviceWeights { stream, ..DeviceWeights::random(&config, &device).unwrap() };
        let error = refusal(&device, &config, weights);
        assert!(error.contains("layers in bf16 has 1 elements there, and 2"), "{error}");
        // All matrices packed, and the head once more.
        let lossless = DeviceOptions { lossless: Some(true), ..DeviceOptions::default() };
        let device = Device::emulator_with(0, &lossless);
        let packed = || DeviceWeights::random(&config, &device).unwrap();
        assert!(packed().packed().is_some());
        assert_eq!(refusal(&device, &config, packed()), "");
        let packed_head = DeviceWeights::random_as(&config, &device, Some(Code::Int4)).unwrap().packed_head;
        let error = refusal(&device, &config, DeviceWeights { packed_head, ..packed() });
        assert!(error.contains("packed head, in chunks,"), "{error}");
    }

    #[test]
    fn no_kernel_runs_on_shapes_that_are_not_covered() {
        let device = Device::emulator(0);
        let refused = |result: Result<DeviceWeights, Error>| {
            assert!(matches!(result, Err(Error::Unsupported { found: 102, .. })), "{:?}", result.err());
        };
        let config = resized(&small(), 102, 256, (2, 1));
        refused(DeviceWeights::random(&config, &device));
        refused(DeviceWeights::random_as(&config, &device, Some(Code::Int4)));
        let mut checkpoint = Checkpoint::demo().unwrap();
        checkpoint.config = config;
        refused(DeviceWeights::upload(&checkpoint, &device, None, || Ok(()), &mut |_, _| ControlFlow::Continue(())));
        assert_eq!(device.calls().launches, 0);
    }

    #[test]
    fn shapes_that_nobody_checked_are_refused() {
        let config = small();
        for (other, what) in [
            (resized(&config, 128, 256, (2, 0)), "query heads"),
            (resized(&config, 128, 256, (5, 2)), "query heads"),
            (resized(&config, 0, 256, (2, 1)), "hidden size"),
            (Config { num_hidden_layers: 0, ..config.clone() }, "a layer"),
            (resized(&config, 128, 1 << 30, (2, 1)), "below 2^30"),
        ] {
            let error = refused(&config, &other);
            assert!(error.contains(what), "{error}");
        }
    }
}
