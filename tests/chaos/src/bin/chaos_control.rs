// SPDX-License-Identifier: MIT OR Apache-2.0
//! The same with a library that can lack defences, so that runs that must fail can be seen to fail.

fn main() -> std::process::ExitCode {
    chaos::command::main()
}
