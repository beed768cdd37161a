/* device.h - the device of a test of kernels, which the worker (apart.h) alone has: it executes the
   calls of the checker, one after the other. The checker's pointers to the device's memory are only
   handed back.

     typedef struct Shared { Calls calls; ... } Shared;    // and what the lab's own calls need
     enum { RUN = OWN_CALLS, ... };
     main(): if (is_worker(argc, argv)) serve(task);         // where task() is serve_call(...)
   A test calls device_alloc() and so on, or fills Shared and calls call_worker(RUN). */
#pragma once
#include "apart.h"
#include "report.h"

// At the end of the assembled kernels; weak, since they are not linked to the checker
__attribute__((weak)) void *lab_alloc(size_t bytes);
__attribute__((weak)) void lab_free(void *memory);
__attribute__((weak)) void lab_copy(void *to, const void *from, size_t bytes, bool to_device);

typedef enum { CALL_ALLOC, CALL_FREE, CALL_TO_DEVICE, CALL_FROM_DEVICE, OWN_CALLS } CallKind;

enum { PIECE = 1 << 20 }; // bytes that are copied at once

typedef struct Calls {
    Apart apart;
    int call;
    void *memory; // on the device
    size_t bytes;
    char piece[PIECE];
} Calls;

static Calls *const device_calls = SHARED_MEMORY;

/* ---- The worker ------------------------------------------------------------------------------ */

static void serve_call(void (*own_call)(int call)) {
    Calls *d = device_calls;
    switch (d->call) {
    case CALL_ALLOC:
        d->memory = lab_alloc(d->bytes);
        break;
    case CALL_FREE:
        lab_free(d->memory);
        break;
    case CALL_TO_DEVICE:
        lab_copy(d->memory, d->piece, d->bytes, true);
        break;
    case CALL_FROM_DEVICE:
        lab_copy(d->piece, d->memory, d->bytes, false);
        break;
    default:
        own_call(d->call);
    }
}

/* ---- The checker ----------------------------------------------------------------------------- */

static void call_worker(int call) {
    device_calls->call = call;
    const char *end = run_apart();
    if (end)
        wrong("your code %s", end);
}

static void *device_alloc(size_t bytes) {
    device_calls->bytes = bytes;
    call_worker(CALL_ALLOC);
    return device_calls->memory;
}

static void device_free(void *memory) {
    device_calls->memory = memory;
    call_worker(CALL_FREE);
}

// The bytes that are left, but at most a piece
static size_t next_piece(size_t left) {
    return left < PIECE ? left : PIECE;
}

static void copy_to_device(char *to, const void *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PIECE) {
        const size_t piece = next_piece(bytes - at);
        memcpy(device_calls->piece, (const char *)from + at, piece);
        device_calls->memory = to + at;
        device_calls->bytes = piece;
        call_worker(CALL_TO_DEVICE);
    }
}

static void copy_from_device(void *to, char *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PIECE) {
        const size_t piece = next_piece(bytes - at);
        device_calls->memory = from + at;
        device_calls->bytes = piece;
        call_worker(CALL_FROM_DEVICE);
        memcpy((char *)to + at, device_calls->piece, piece);
    }
}
