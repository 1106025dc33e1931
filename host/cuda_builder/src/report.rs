//! Reads what `ptxas -v` reports about the code that it makes.

/// A function's registers and stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionReport {
    /// The name of a kernel, or of a function that kernels call.
    pub name: String,
    /// Bytes of its stack frame.
    pub stack: u32,
    /// Bytes of registers that it spills to the stack.
    pub spill_stores: u32,
    /// Bytes of spilled registers that it loads back.
    pub spill_loads: u32,
    /// Registers per thread. None for a function that is not a kernel.
    pub registers: Option<u32>,
}

impl FunctionReport {
    /// All functions of a report, in its order. Lines about other things are skipped.
    ///
    /// # Errors
    /// The first line about a function's stack that does not have the known form.
    pub fn read_all(report: &str) -> Result<Vec<Self>, String> {
        let (mut kernel, mut name) = (String::new(), String::new());
        let mut functions: Vec<Self> = Vec::new();
        for line in report.lines() {
            if let Some(rest) = behind(line, "Compiling entry function '") {
                kernel = rest.split('\'').next().unwrap_or_default().into();
            } else if let Some(rest) = behind(line, "Function properties for ") {
                name = rest.trim().into();
            } else if line.contains("bytes stack frame") {
                let [stack, spill_stores, spill_loads] = stack_and_spills(line).ok_or(line)?;
                functions.push(Self { name: name.clone(), stack, spill_stores, spill_loads, registers: None });
            } else if let Some(rest) = behind(line, "Used ")
                && let Some(function) = functions.iter_mut().rev().find(|function| function.name == kernel)
            {
                function.registers = rest.split(' ').next().and_then(|number| number.parse().ok());
            }
        }
        Ok(functions)
    }
}

/// The part of a line that follows these words.
fn behind<'l>(line: &'l str, words: &str) -> Option<&'l str> {
    line.split_once(words).map(|(_, rest)| rest)
}

/// The three numbers of a line about a function's stack: frame, spill stores, spill loads.
fn stack_and_spills(line: &str) -> Option<[u32; 3]> {
    let (stack, rest) = line.trim().split_once(" bytes stack frame, ")?;
    let (stores, loads) = rest.split_once(" bytes spill stores, ")?;
    let loads = loads.strip_suffix(" bytes spill loads")?;
    Some([stack.parse().ok()?, stores.parse().ok()?, loads.parse().ok()?])
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
        assert_eq!(FunctionReport::read_all(report).as_deref(), Ok(&expected[..]));
        assert_eq!(FunctionReport::read_all("ptxas fatal   : Unresolved extern function"), Ok(vec![]));
    }

    #[test]
    fn a_line_of_another_form_is_no_function_without_spills() {
        for line in [
            "    24 bytes stack frame, spills: 8 bytes",
            "    some bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
        ] {
            assert_eq!(FunctionReport::read_all(line), Err(line.to_owned()));
        }
    }
}
