// SPDX-License-Identifier: MIT OR Apache-2.0
//! All-reduce of CUDA memory.
