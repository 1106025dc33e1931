//! A macro for kernels that differ only in the function that they run.
//!
//! # Safety
//! A kernel requires what its parameter block says.

/// Defines kernels of one parameter block: for each its documentation, its name, and the function that it runs.
macro_rules! entry_points {
    ($launch:tt of $params:ty: $($(#[$doc:meta])* $name:ident: $run:path;)*) => { $(
        $(#[$doc])*
        #[cuda_std::kernel $launch]
        pub unsafe fn $name(p: $params) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { $run(&p) }
        }
    )* };
}
