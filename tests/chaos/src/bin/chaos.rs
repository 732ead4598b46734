// SPDX-License-Identifier: MIT OR Apache-2.0
//! See [`chaos::command`].

fn main() -> std::process::ExitCode {
    chaos::command::main()
}
