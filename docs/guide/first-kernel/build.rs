//! Compiles `kernels` to PTX, which the program holds as text.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    // Every card from compute capability 8.0 runs it; `sm_90a` has Hopper's instructions too.
    cuda_builder::CudaBuilder::new("kernels").arch("sm_80").copy_to(out.join("kernels.ptx")).build()?;
    Ok(())
}
