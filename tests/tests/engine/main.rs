//! The engine as a whole, on the CPU and under the emulator. One binary, so that its tests share the cores to the end.

mod batch;
mod batch_emulated;
mod distribution;
mod draft_models;
mod driver_calls;
mod eagle;
mod endings;
mod exactness;
mod forms;
mod golden_cpu;
mod golden_emulated;
mod paths_emulated;
