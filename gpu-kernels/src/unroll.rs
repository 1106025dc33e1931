//! Loops over registers.

/// Repeats a body with `i = 0, 1, … , N − 1`, written out: an array indexed by such an `i` stays in registers, where a loop
/// that the compiler does not unroll would move it to local memory. `N` is a constant of at most 16.
macro_rules! unroll {
    ($i:ident < $n:expr; $body:block) => {
        unroll!(@ $i, $n, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $i:ident, $n:expr, $body:block, $($v:literal)*) => { $(
        if $v < $n {
            #[allow(non_snake_case)]
            let $i: usize = $v;
            $body
        }
    )* };
}
