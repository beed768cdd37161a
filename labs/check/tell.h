/* tell.h - how a test program speaks to check.sh: it tells what is wrong and ends with 1, or it
   ends with 0 and hands on the word. */
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

// Prints a line and ends the program, whatever its other threads do.
static _Noreturn void wrong(const char *format, ...) __attribute__((format(printf, 1, 2), unused));
static _Noreturn void wrong(const char *format, ...) {
    static bool told;
    if (__atomic_exchange_n(&told, true, __ATOMIC_RELAXED))
        for (;;)
            pause(); // another thread tells what it has seen
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    puts("");
    fflush(stdout);
    _exit(1);
}

// The word that only the checker knows, read behind all that the student's parts have done.
static void say_word(void) {
    char word[64] = "";
    if (!fgets(word, sizeof word, stdin) || write(9, word, strlen(word)) < 0)
        _exit(1);
}
