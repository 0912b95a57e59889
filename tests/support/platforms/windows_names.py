"""The names in the standard library that exist on POSIX systems but not on Windows.

They are from the "Availability" notes of Python's documentation. Names that llmrun is unlikely to use are left out.
"""

from __future__ import annotations

ABSENT_MODULES = (
    "crypt",
    "curses",
    "fcntl",
    "grp",
    "posix",
    "pty",
    "pwd",
    "readline",
    "resource",
    "syslog",
    "termios",
    "tty",
)

ABSENT_NAMES = {
    "os": """
        O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NDELAY O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH
        O_SYNC O_TMPFILE POSIX_FADV_DONTNEED POSIX_FADV_SEQUENTIAL POSIX_FADV_WILLNEED ST_NOEXEC ST_RDONLY
        WCOREDUMP WEXITSTATUS WIFEXITED WIFSIGNALED WNOHANG WTERMSIG WUNTRACED chown chroot confstr
        copy_file_range ctermid environb eventfd fchdir fchmod fchown fdatasync fork forkpty fpathconf fstatvfs
        fwalk getegid getenvb geteuid getgid getgrouplist getgroups getloadavg getpgid getpgrp getpriority
        getrandom getresuid getsid getuid getxattr killpg lchown listxattr lockf memfd_create mkfifo mknod nice
        openpty pathconf pidfd_open pipe2 posix_fadvise posix_fallocate posix_spawn posix_spawnp pread preadv
        pwrite pwritev readv register_at_fork sched_getaffinity sched_setaffinity sched_yield sendfile setegid
        seteuid setgid setpgid setpgrp setpriority setsid setuid setxattr splice statvfs sync sysconf tcgetpgrp
        tcsetpgrp ttyname uname wait wait3 wait4 waitid writev
    """,
    "signal": """
        ITIMER_PROF ITIMER_REAL ITIMER_VIRTUAL SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE
        SIGPROF SIGQUIT SIGSTOP SIGSYS SIGTRAP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH
        SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause pidfd_send_signal pthread_kill
        pthread_sigmask setitimer siginterrupt sigpending sigtimedwait sigwait sigwaitinfo
    """,
    "socket": """
        AF_UNIX SCM_RIGHTS SO_PEERCRED SO_REUSEPORT TCP_USER_TIMEOUT recv_fds send_fds
    """,
    "mmap": """
        MADV_DONTNEED MADV_HUGEPAGE MADV_SEQUENTIAL MADV_WILLNEED MAP_ANON MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED
        PROT_READ
    """,
    "select": """
        PIPE_BUF POLLERR POLLHUP POLLIN POLLOUT epoll poll
    """,
    "time": """
        CLOCK_MONOTONIC CLOCK_PROCESS_CPUTIME_ID CLOCK_REALTIME CLOCK_THREAD_CPUTIME_ID clock_gettime
        clock_gettime_ns tzset
    """,
}
