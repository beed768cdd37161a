/* steps.c - a training step allocates no memory and starts no thread. Calls are counted by
   definitions of malloc() and others that the linker prefers to the C library's. */

#include <dlfcn.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED
#endif
#endif

#if defined(__GLIBC__) && !defined(SANITIZED)
#define COUNTS_ALLOCATIONS
static volatile bool counting; // compilers think that malloc reads no variable of ours
static volatile size_t allocations;
void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

extern char __executable_start[],
    etext[]; // the linker's: where this program's code begins and ends

/* clang's libomp takes memory for every parallel region. That is not ours to change, so with clang
   only calls from this program count; with gcc those that libgomp makes count as well. */
static bool is_ours(const void *caller) {
#ifdef __clang__
    return (uintptr_t)caller >= (uintptr_t)__executable_start &&
           (uintptr_t)caller < (uintptr_t)etext;
#else
    return caller != NULL;
#endif
}

static void count_one(const void *caller) {
    if (is_ours(caller) && __atomic_load_n(&counting, __ATOMIC_RELAXED))
        __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
}

// The program's own definitions come before the C library's, also for what libgomp calls.
__attribute__((noinline)) void *malloc(size_t size) {
    count_one(__builtin_return_address(0));
    return __libc_malloc(size);
}

__attribute__((noinline)) void *calloc(size_t count, size_t size) {
    count_one(__builtin_return_address(0));
    return __libc_calloc(count, size);
}

__attribute__((noinline)) void *realloc(void *memory, size_t size) {
    count_one(__builtin_return_address(0));
    return __libc_realloc(memory, size);
}

__attribute__((noinline)) void *aligned_alloc(size_t alignment, size_t size) {
    count_one(__builtin_return_address(0));
    return __libc_memalign(alignment, size);
}

__attribute__((noinline)) int posix_memalign(void **memory, size_t alignment, size_t size) {
    count_one(__builtin_return_address(0));
    *memory = __libc_memalign(alignment, size);
    return *memory ? 0 : ENOMEM;
}

__attribute__((noinline)) int pthread_create(pthread_t *thread, const pthread_attr_t *attr,
                                             void *(*start)(void *), void *argument) {
    typedef int Create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    count_one(__builtin_return_address(0));
    Create *create;
    *(void **)&create = dlsym(RTLD_NEXT, "pthread_create");
    return create(thread, attr, start, argument);
}

static void train_steps(Net *net, Loader *l, real *state, size_t steps) {
    for (size_t step = 0; step < steps; step++) {
        const Batch *batch = loader_next(l);
        net_load(net, batch, .1);
        if (output(net, 0) != batch->device_images)
            fail("a CPU has copied the loader's images");
        forward(net, batch->n, &net->step->key);
        double loss = loss_and_gradient(net, batch->n).mean;
        if (!isfinite(loss))
            fail("the loss is %g", loss);
        backward(net, batch->n);
        optimizer_step(net, state);
    }
}

static void *no_work(void *argument) {
    return argument;
}

// The counter has to see what it is there for.
static void check_counter(void) {
    allocations = 0;
    counting = true;
    void *volatile memory = malloc(10);
    free(memory);
    free(must_alloc(10, "a control"));
    pthread_t thread;
    if (pthread_create(&thread, NULL, no_work, NULL) == 0)
        pthread_join(thread, NULL);
    counting = false;
    if (allocations < 3)
        fail("control: %zu of 3 allocations and threads counted", allocations);
}

static void test_steady_steps(const Model *model, const Optimizer *o, Augment *augment) {
    static Net net;
    Settings settings = plain;
    settings.momentum = .9;
    settings.optimizer = (OptimizerChoice)(o - optimizers);
    DatasetInfo info = dataset_for(model, "synthetic");
    Dataset data = {.info = &info};
    Loader l;
    make_synthetic(&data, TRAINING_SET, 160);
    net_build(&net, model, &info, &settings, &fast_kernels);
    plan_net(&net, 16, 0);
    net_alloc(&net);
    init_weights(&net, 1);
    real *state = must_alloc(2 * net.param_size * sizeof(real), "a test");
    plan_loader(&l, &data, 16, 2, augment, on_cpu);
    loader_start(&l, 1, 1, 0);
    train_steps(&net, &l, state, 3);
    allocations = 0;
    counting = true;
    train_steps(&net, &l, state, 5);
    counting = false;
    if (allocations)
        fail("%s: %zu allocations or new threads in 5 steps", model->name, allocations);
    loader_free(&l);
    memory_plan_free(&net.plan);
    free(state);
    free_dataset(&data);
}
#endif

static void test_steps(void) {
#ifdef COUNTS_ALLOCATIONS
    check_counter();
    test_steady_steps(find_model("mnist"), &optimizers[0], augment_elastic);
    test_steady_steps(find_model("resnet8"), &optimizers[1], augment_crop_flip);
    verdict("no allocation and no new thread in a training step");
#else
    skip("no allocation and no new thread in a training step",
         "the allocator cannot be replaced here (sanitizer, or not glibc)");
#endif
}
