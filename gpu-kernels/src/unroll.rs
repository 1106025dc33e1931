//! Loops over registers.

/// Repeats a body, written out, with the constant `I = 0, 1, … , N − 1`. An array indexed by such an `I` stays in
/// registers; a loop that the compiler does not unroll would move it to local memory.
///
/// `N` is a literal or a constant of at most 16. With a constant, better give the most that it can be as well
/// (`T < TILES of 2`): every copy is compiled before its condition is known, and nested loops multiply the copies.
#[macro_export]
macro_rules! unroll {
    ($i:ident < $n:tt of $most:tt; $body:block) => {
        $crate::unroll!(@count $most, $i, $n, $body)
    };
    ($i:ident < $n:tt; $body:block) => {
        $crate::unroll!(@count $n, $i, $n, $body)
    };
    (@count 2, $($rest:tt)*) => { $crate::unroll!(@copies $($rest)*, 0 1) };
    (@count 3, $($rest:tt)*) => { $crate::unroll!(@copies $($rest)*, 0 1 2) };
    (@count 4, $($rest:tt)*) => { $crate::unroll!(@copies $($rest)*, 0 1 2 3) };
    (@count 5, $($rest:tt)*) => { $crate::unroll!(@copies $($rest)*, 0 1 2 3 4) };
    (@count 6, $($rest:tt)*) => { $crate::unroll!(@copies $($rest)*, 0 1 2 3 4 5) };
    (@count 8, $($rest:tt)*) => { $crate::unroll!(@copies $($rest)*, 0 1 2 3 4 5 6 7) };
    (@count $most:tt, $($rest:tt)*) => { $crate::unroll!(@copies $($rest)*, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15) };
    (@copies $i:ident, $n:tt, $body:block, $($v:literal)*) => { $(
        if $v < $n {
            #[allow(non_upper_case_globals, dead_code)]
            const $i: usize = $v;
            // The copies beyond N, which never run, index out of bounds.
            #[allow(clippy::out_of_bounds_indexing)]
            $body
        }
    )* };
}
