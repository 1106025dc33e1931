//! What `ptxas -v` says of the code that it makes.

/// A function's registers and stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionReport {
    /// Its name: a kernel's, or that of a function which kernels call.
    pub name: String,
    /// Bytes of its stack frame.
    pub stack: u32,
    /// Bytes of registers that it stores there for want of room.
    pub spill_stores: u32,
    /// Bytes of them that it loads again.
    pub spill_loads: u32,
    /// Registers of a thread; none of what is no kernel.
    pub registers: Option<u32>,
}

impl FunctionReport {
    /// All functions of a report, in its order. What else it says is passed over.
    #[must_use]
    pub fn read_all(report: &str) -> Vec<Self> {
        let (mut kernel, mut name) = (String::new(), String::new());
        let mut functions: Vec<Self> = Vec::new();
        for line in report.lines() {
            if let Some(rest) = behind(line, "Compiling entry function '") {
                kernel = rest.split('\'').next().unwrap_or_default().into();
            } else if let Some(rest) = behind(line, "Function properties for ") {
                name = rest.trim().into();
            } else if line.contains("bytes stack frame") {
                let mut numbers = line.split(',').map(first_number);
                let mut next = || numbers.next().flatten().unwrap_or_default();
                let (stack, spill_stores, spill_loads) = (next(), next(), next());
                functions.push(Self { name: name.clone(), stack, spill_stores, spill_loads, registers: None });
            } else if let Some(rest) = behind(line, "Used ")
                && let Some(function) = functions.iter_mut().rev().find(|function| function.name == kernel)
            {
                function.registers = first_number(rest);
            }
        }
        functions
    }
}

/// What a line has behind these words.
fn behind<'l>(line: &'l str, words: &str) -> Option<&'l str> {
    line.split_once(words).map(|(_, rest)| rest)
}

/// The number with which a text begins.
fn first_number(text: &str) -> Option<u32> {
    text.trim_start().split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_and_what_they_call_are_read() {
        let report = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'add' for 'sm_90a'
ptxas info    : Function properties for add
    24 bytes stack frame, 28 bytes spill stores, 40 bytes spill loads
ptxas info    : Function properties for step
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 24 bytes cumulative stack size
ptxas info    : Compile time = 3.085 ms
ptxas info    : Compiling entry function 'clear' for 'sm_90a'
ptxas info    : Function properties for clear
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
";
        let function = |name: &str, [stack, spill_stores, spill_loads]: [u32; 3], registers| FunctionReport {
            name: name.into(),
            stack,
            spill_stores,
            spill_loads,
            registers,
        };
        let expected = [
            function("add", [24, 28, 40], Some(168)),
            function("step", [8, 0, 0], None),
            function("clear", [0; 3], Some(12)),
        ];
        assert_eq!(FunctionReport::read_all(report), expected);
        assert_eq!(FunctionReport::read_all("ptxas fatal   : Unresolved extern function"), []);
    }
}
