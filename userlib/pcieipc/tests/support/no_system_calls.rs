// SPDX-License-Identifier: MIT OR Apache-2.0
//! Proof that a piece of code makes no system call: the kernel ends the process at the first one.

/// What a process ends with whose `body` was true and made no system call.
pub const NONE_MADE: i32 = 42;
/// What it ends with when `body` was false.
pub const FALSE: i32 = 43;

/// Runs `body` in this thread with every system call but exit_group forbidden, then ends the process. At a system call the
/// kernel ends it with SIGSYS.
pub fn without_system_calls(body: impl FnOnce() -> bool) -> ! {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let mut only_exit = [
        // The number of the call is the first word of what the filter sees.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter { jf: 1, ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_exit_group as u32) },
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_KILL_PROCESS),
    ];
    let program = libc::sock_fprog { len: only_exit.len() as u16, filter: only_exit.as_mut_ptr() };
    // SAFETY: the arguments are as prctl(2) and seccomp(2) ask for; the program lives until the call returns, and the kernel
    // copies it. After it, this thread runs `body` and ends the process.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program), 0);
        let good = body();
        libc::_exit(if good { NONE_MADE } else { FALSE })
    }
}
