/* faults.c - makes the n-th call of some kind fail, or ends the program at it: a library for
   LD_PRELOAD.

     FAULT=write,fsync:3:5     the 3rd of all calls of write() and fsync() fails with errno 5
     FAULT=rename:1:kill       SIGKILL just before the first rename()
     FAULT=malloc:0:12         none fails; but:
     FAULT_COUNT=FILE          writes there, at exit, how many there were

   System calls: the kernel sends SIGSYS for each of them (seccomp), wherever in libc it is made,
   and the handler makes it again, or not. A library's functions with the names of libc's would not
   see the calls that stdio makes. malloc (with realloc, calloc, posix_memalign) and pthread_create
   are such functions; they count the calls of the program itself and of libc, since libgomp and MPI
   end the program on their own. The program must not start others, which would have no handler. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { MOST_CALLS = 32, MEMORY = -1, THREADS = -2, KILL = -1 };

static const struct {
    const char *name;
    int numbers[3]; // system calls; -3: none
} kinds[] = {
#ifdef __NR_open
    {"open", {__NR_open, __NR_openat, -3}},
    {"rename", {__NR_rename, __NR_renameat, __NR_renameat2}},
    {"unlink", {__NR_unlink, __NR_unlinkat, -3}},
    {"mkdir", {__NR_mkdir, __NR_mkdirat, -3}},
    {"access", {__NR_access, __NR_faccessat, __NR_faccessat2}},
    {"stat", {__NR_stat, __NR_fstat, __NR_newfstatat}},
#else
    {"open", {__NR_openat, -3, -3}},
    {"rename", {__NR_renameat, __NR_renameat2, -3}},
    {"unlink", {__NR_unlinkat, -3, -3}},
    {"mkdir", {__NR_mkdirat, -3, -3}},
    {"access", {__NR_faccessat, __NR_faccessat2, -3}},
    {"stat", {__NR_fstat, __NR_newfstatat, -3}},
#endif
    {"write", {__NR_write, __NR_writev, __NR_pwrite64}},
    {"read", {__NR_read, __NR_readv, __NR_pread64}},
    {"fsync", {__NR_fsync, __NR_fdatasync, -3}},
    {"close", {__NR_close, -3, -3}},
    {"lseek", {__NR_lseek, -3, -3}},
    {"truncate", {__NR_truncate, __NR_ftruncate, -3}},
    {"chmod", {__NR_fchmod, __NR_fchmodat, -3}},
    {"malloc", {MEMORY, -3, -3}},
    {"pthread_create", {THREADS, -3, -3}},
};

static int watched[MOST_CALLS];
static size_t watches;
static unsigned long wanted, counted;
static int action; // an errno, or KILL

static _Noreturn void give_up(const char *why) {
    dprintf(STDERR_FILENO, "faults.c: %s\n", why);
    _exit(99);
}

// Whether this call is the one that fails; ends the program if it is to be killed at it.
static int fails(void) {
    if (__atomic_add_fetch(&counted, 1, __ATOMIC_SEQ_CST) != wanted)
        return 0;
    if (action == KILL)
        syscall(SYS_kill, getpid(), SIGKILL);
    return action;
}

static int watches_call(int number) {
    for (size_t i = 0; i < watches; i++)
        if (watched[i] == number)
            return 1;
    return 0;
}

/* ---- System calls ---------------------------------------------------------------------------- */

// The only place from which the filter lets them pass; the label is where such a call returns.
long pass_on(long number, long a, long b, long c, long d, long e);
extern const char passed_on[];

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
__asm__(".text\n.globl pass_on\n.type pass_on, @function\npass_on:\n"
        "mov %rdi, %rax\nmov %rsi, %rdi\nmov %rdx, %rsi\nmov %rcx, %rdx\nmov %r8, %r10\n"
        "mov %r9, %r8\nsyscall\n.globl passed_on\npassed_on:\nret\n");
#define ARGUMENT(i) (context->uc_mcontext.gregs[registers[i]])
#define RESULT (context->uc_mcontext.gregs[REG_RAX])
static const int registers[] = {REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8};
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
__asm__(".text\n.globl pass_on\n.type pass_on, %function\npass_on:\n"
        "mov x8, x0\nmov x0, x1\nmov x1, x2\nmov x2, x3\nmov x3, x4\nmov x4, x5\nsvc 0\n"
        ".globl passed_on\npassed_on:\nret\n");
#define ARGUMENT(i) (context->uc_mcontext.regs[i])
#define RESULT (context->uc_mcontext.regs[0])
#else
#error "faults.c knows how x86-64 and aarch64 call the kernel"
#endif

static void on_call(int signal, siginfo_t *info, void *at) {
    (void)signal;
    ucontext_t *context = at;
    const int kept = errno, error = fails();
    RESULT = error ? -error
                   : pass_on(info->si_syscall, (long)ARGUMENT(0), (long)ARGUMENT(1),
                             (long)ARGUMENT(2), (long)ARGUMENT(3), (long)ARGUMENT(4));
    errno = kept;
}

static void watch_calls(void) {
    struct sock_filter filter[2 * MOST_CALLS + 16];
    unsigned short n = 0;
    const uint64_t address = (uint64_t)(uintptr_t)passed_on;
    const size_t place = offsetof(struct seccomp_data, instruction_pointer); // little-endian
    struct sigaction act = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO | SA_NODEFER};
#define STEP(...) filter[n++] = (struct sock_filter)__VA_ARGS__
    STEP(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, place));
    STEP(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)address, 0, 3));
    STEP(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, place + 4));
    STEP(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(address >> 32), 0, 1));
    STEP(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    STEP(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)));
    for (size_t i = 0; i < watches; i++) {
        if (watched[i] < 0)
            continue;
        STEP(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)watched[i], 0, 1));
        STEP(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
    }
    STEP(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    struct sock_fprog program = {.len = n, .filter = filter};
    if (sigaction(SIGSYS, &act, NULL) != 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        give_up("this kernel does not let a program watch its own calls (seccomp)");
}

/* ---- Memory and threads ---------------------------------------------------------------------- */

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

// Whether a function of the program, or of libc, is the caller.
static int is_ours(const void *caller) {
    static __thread int looking; // dladdr() itself may need memory
    Dl_info info;
    if (looking || !watches_call(MEMORY))
        return 0;
    looking = 1;
    int ours = dladdr(caller, &info) &&
               (!strstr(info.dli_fname, ".so") || strstr(info.dli_fname, "/libc.so"));
    looking = 0;
    return ours;
}

#define REFUSE(refusal)                                    \
    if (is_ours(__builtin_return_address(0)) && fails()) { \
        errno = ENOMEM;                                    \
        return refusal;                                    \
    }

void *malloc(size_t bytes) {
    REFUSE(NULL)
    return __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes) {
    REFUSE(NULL)
    return __libc_calloc(count, bytes);
}

void *realloc(void *old, size_t bytes) {
    REFUSE(NULL)
    return __libc_realloc(old, bytes);
}

int posix_memalign(void **to, size_t alignment, size_t bytes) {
    REFUSE(ENOMEM)
    *to = __libc_memalign(alignment, bytes);
    return *to ? 0 : ENOMEM;
}

typedef int Create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

int pthread_create(pthread_t *id, const pthread_attr_t *attributes, void *(*start)(void *),
                   void *argument) {
    Create *create = (Create *)dlsym(RTLD_NEXT, "pthread_create");
    Dl_info info;
    if (watches_call(THREADS) && dladdr(__builtin_return_address(0), &info) &&
        !strstr(info.dli_fname, ".so") && fails())
        return EAGAIN;
    return create(id, attributes, start, argument);
}

/* ---- Begin and end --------------------------------------------------------------------------- */

static void watch(const char *name, size_t length) {
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        if (strlen(kinds[k].name) == length && strncmp(kinds[k].name, name, length) == 0) {
            for (size_t i = 0; i < 3 && watches < MOST_CALLS; i++)
                if (kinds[k].numbers[i] != -3)
                    watched[watches++] = kinds[k].numbers[i];
            return;
        }
    give_up("FAULT has a name that it does not know");
}

__attribute__((constructor)) static void begin(void) {
    const char *at = getenv("FAULT");
    char word[8];
    if (!at)
        return;
    for (size_t length; *at && *at != ':'; at += length + (at[length] == ',')) {
        length = strcspn(at, ",:");
        watch(at, length);
    }
    if (sscanf(at, ":%lu:%7s", &wanted, word) != 2)
        give_up("expected FAULT=NAME,...:NUMBER:ERRNO or :kill");
    action = strcmp(word, "kill") == 0 ? KILL : atoi(word);
    counted = 0;
    watch_calls();
}

__attribute__((destructor)) static void end(void) {
    const char *path = getenv("FAULT_COUNT");
    const unsigned long count = counted;
    int file = path ? open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666) : -1;
    if (file >= 0)
        dprintf(file, "%lu\n", count);
}
