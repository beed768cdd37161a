/* Training speed without the loader: whole steps (forward, loss, backward, optimizer) on one batch
   in memory, against the multiply-add peak and the copy bandwidth of the same run. Prints one line
   of key=value; with several threads, rounds with all and with one alternate, with two also rounds
   with one beside a second program. Times vary from run to run, the per cent of the peak less. With
   --layers it prints where the time of the products goes, by layer and pass. */
#define CNN_NO_MAIN
#include "../../cnn.c"
#include <stdatomic.h>
#include <sys/mman.h>

static double copy_gb_per_s(void) {
    const size_t bytes = (size_t)256 << 20;
    char *from = must_alloc(bytes, "bandwidth"), *to = must_alloc(bytes, "bandwidth");
    double best = 0;
    for (int repeat = 0; repeat < 5; repeat++) {
        double begin = now();
        PARALLEL_FOR
        for (size_t i = 0; i < bytes; i += 1 << 20)
            memcpy(to + i, from + i, 1 << 20);
        best = fmax(best, 2e-9 * (double)bytes / (now() - begin)); // read and written
    }
    free(from);
    free(to);
    return best;
}

// The network of the settings on synthetic images, and a loader that holds one batch of them.
static const Batch *setup_bench(Run *run) {
    Settings *s = &run->settings;
    const Consumer on_cpu = {.device = &cpu_device, .ranks = 1};
    run->dataset_info = dataset_for(run->model, "synthetic");
    run->train_set.info = &run->dataset_info;
    make_synthetic(&run->train_set, TRAINING_SET, s->batch_size);
    net_build(&run->net, run->model, &run->dataset_info, s, choose_kernels(s, false));
    plan_net(&run->net, s->batch_size, 0);
    net_alloc(&run->net);
    init_weights(&run->net, s->seed);
    run->plan.device = &cpu_device;
    memory_plan_add(&run->plan, &run->optimizer_state,
                    count_states(&optimizers[s->optimizer], s) * run->net.param_size * sizeof(real),
                    DEVICE_MEMORY, FOR_OPTIMIZER);
    memory_plan_alloc(&run->plan);
    loader_plan(&run->train_loader, &run->train_set, s->batch_size, 1, AUGMENT_NONE, on_cpu);
    loader_init(&run->train_loader);
    loader_start(&run->train_loader, s->seed, 1, 0);
    return loader_next(&run->train_loader);
}

static void train_step(Run *run, const Batch *batch, size_t step) {
    Batch drawn = *batch;
    drawn.key = (RandomKey){run->settings.seed, 1, step * batch->n, 1};
    net_load(&run->net, &drawn, 1e-4);
    forward(&run->net, batch->n, &run->net.step->key);
    check_loss(&run->net, batch, loss_and_gradient(&run->net, batch->n));
    backward(&run->net, batch->n);
    optimizer_step(&run->net, run->optimizer_state);
}

// Images a second over at least round_seconds and two steps, after one that fills the caches.
static double measure_steps(Run *run, const Batch *batch, size_t *steps) {
    train_step(run, batch, (*steps)++);
    const double round_seconds = 0.4, begin = now();
    size_t before = *steps;
    while (*steps < before + 2 || now() - begin < round_seconds)
        train_step(run, batch, (*steps)++);
    return (double)((*steps - before) * batch->n) / (now() - begin);
}

/* A second program, which trains the same with one thread while it is wanted. One thread beside it
   shows what this machine gives to two programs that share nothing but its memory and caches: a
   yardstick for two threads of one program. */
typedef struct Neighbor {
    pid_t pid;
    atomic_bool wanted, busy;
    atomic_size_t steps;
} Neighbor;

static Neighbor *start_neighbor(Run *run) {
    Neighbor *n = mmap(NULL, sizeof *n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t parent = getpid(), child = n == MAP_FAILED ? -1 : fork();
    if (child < 0)
        die(1, "no second program: %s", strerror(errno));
    if (child > 0) {
        n->pid = child;
        return n;
    }
    set_num_threads(1);
    const Batch *batch = setup_bench(run);
    while (getppid() == parent) {
        n->busy = n->wanted;
        if (n->busy)
            train_step(run, batch, n->steps++);
        else
            usleep(1000);
    }
    exit(0);
}

// Waits a moment, or dies if nothing is left to wait for.
static void wait_for(const Neighbor *n) {
    if (waitpid(n->pid, NULL, WNOHANG) != 0)
        die(1, "the second program has ended; is there memory for two?");
    usleep(1000);
}

static double measure_beside(Neighbor *n, Run *run, const Batch *batch, size_t *steps) {
    n->wanted = true;
    for (size_t before = n->steps; n->steps < before + 2;)
        wait_for(n);
    double speed = measure_steps(run, batch, steps);
    n->wanted = false;
    while (n->busy)
        wait_for(n);
    return speed;
}

/* ---- --layers ------------------------------------------------------------------------------- */

typedef struct Measured {
    double seconds, operations; // operations: that were executed, 2 for each multiply-add
    double dense;               // of the definition
} Measured;

enum { WINOGRAD, WIDE_1X1, STRIDED_3X3, NO_GROUP, GROUPS };
static const char *const groups[GROUPS] = {"Winograd", "1 x 1, stride 1, 64 channels or more",
                                           "3 x 3, stride 2", "all others"};

static int group_of(const Layer *l) {
    if (forward_pass(l, false, NULL).tile > 0)
        return WINOGRAD;
    if (l->kind == CONV2D && l->kernel_size == 1 && l->stride == 1 &&
        min_size(l->in.c, l->out.c) >= 64)
        return WIDE_1X1;
    return l->kernel_size == 3 && l->stride == 2 ? STRIDED_3X3 : NO_GROUP;
}

// Seconds of a call, the least of several; with one thread they are CPU time, which other programs
// disturb less.
static double best_seconds(void (*pass)(Work w), Work w) {
    double (*const seconds)(void) = num_threads == 1 ? thread_seconds : now;
    double best = INFINITY;
    for (int i = 0; i < 7; i++) {
        const double begin = seconds();
        pass(w);
        best = fmin(best, seconds() - begin);
    }
    return best;
}

static void print_measured(const char *name, Measured m, double peak) {
    printf("  %-8s %8.3f ms %5.0f %% (%.0f)", name, 1e3 * m.seconds,
           100e-9 * m.operations / m.seconds / peak, 100e-9 * m.dense / m.seconds / peak);
}

// The three passes of a row; returns their sum.
static Measured measure_row(const Net *net, size_t row, size_t n, double peak) {
    const Layer *l = &net->layers[row];
    const Kernels *k = net->kernels;
    const double dense = (double)n * forward_flops(l);
    Work all = work_of(net, row, n, NULL), weights = all;
    weights.din = NULL;
    Pass p = forward_pass(l, false, all.prepared);
    p.n = n;
    const Measured forward = {best_seconds(k->layers[l->kind].forward, all),
                              2 * pass_products(&p, ROWS), dense};
    const Measured gradient = {best_seconds(k->layers[l->kind].backward, weights),
                               k->flops(weights) - forward.operations, dense};
    Measured data = {0};
    print_measured("forward", forward, peak);
    print_measured("weights", gradient, peak);
    if (all.din) {
        data.seconds = best_seconds(k->layers[l->kind].backward, all) - gradient.seconds;
        data.operations = k->flops(all) - k->flops(weights);
        data.dense = dense;
        print_measured("data", data, peak);
    }
    printf("\n");
    return (Measured){.seconds = forward.seconds + gradient.seconds + data.seconds,
                      .operations = forward.operations + gradient.operations + data.operations};
}

// Per cent of the peak: of the operations that are executed and, in brackets, of the definition's
static void print_layers(const Net *net, size_t n) {
    const double peak = cpu_peak_gflops();
    Measured sums[GROUPS] = {{0}};
    printf("Per cent of the peak, %.0f GFLOP/s: executed (of the definition)\n", peak);
    for (size_t row = 1; row < net->layer_count; row++) {
        const Layer *l = &net->layers[row];
        char text[64];
        if (!has_weight_matrix(l))
            continue;
        describe_layer(l, text, sizeof text);
        printf("%-24s %-34s %3zu x %-3zu %4zu -> %-4zu", l->name, text, l->in.h, l->in.w, l->in.c,
               l->out.c);
        const Measured m = measure_row(net, row, n, peak);
        Measured *sum = &sums[group_of(l)];
        sum->seconds += m.seconds;
        sum->operations += m.operations;
    }
    for (int i = 0; i < GROUPS; i++)
        if (sums[i].seconds > 0)
            printf("%-40s %8.3f ms %5.0f %%\n", groups[i], 1e3 * sums[i].seconds,
                   100e-9 * sums[i].operations / sums[i].seconds / peak);
}

int main(int argc, char **argv) {
    enum { ROUNDS = 9 };
    static Run run;
    setup_settings(&run, argc, argv);
    Neighbor *neighbor = NULL;
    if (num_threads == 2 && !run.settings.layers)
        neighbor = start_neighbor(&run);
    const Batch *batch = setup_bench(&run);
    size_t steps = 0;
    train_step(&run, batch, steps++);
    if (run.settings.layers) {
        print_layers(&run.net, batch->n);
        return 0;
    }
    struct rusage usage; // before this program's own arrays
    getrusage(RUSAGE_SELF, &usage);
    double speeds[ROUNDS], scaling[ROUNDS], programs[ROUNDS / 3], peaks[ROUNDS];
    double bandwidth = copy_gb_per_s();
    for (size_t round = 0; round < ROUNDS; round++) {
        peaks[round] = cpu_peak_gflops();
        speeds[round] = measure_steps(&run, batch, &steps);
        scaling[round] = 1;
        if (num_threads == 1)
            continue;
        set_num_threads(1); // in turn, so that both meet the same neighbors
        double one = measure_steps(&run, batch, &steps);
        scaling[round] = speeds[round] / one;
        if (neighbor && round % 3 == 0)
            programs[round / 3] = 2 * measure_beside(neighbor, &run, batch, &steps) / one;
        set_num_threads((int)run.settings.threads);
    }
    double speed = median(speeds, ROUNDS), peak = median(peaks, ROUNDS);
    double gflops = speed * training_flops(&run.net) / 1e9;
    printf("cnn model=%s width=%zu batch=%zu threads=%zu steps_img_per_s=%.1f "
           "times_one_thread=%.2f gflops=%.1f peak_gflops=%.1f percent_of_peak=%.1f rss_mb=%.0f "
           "copy_gb_per_s=%.1f..%.1f",
           run.settings.model, run.settings.width, batch->n, run.settings.threads, speed,
           median(scaling, ROUNDS), gflops, peak, 100 * gflops / peak,
           (double)usage.ru_maxrss * 1024 / 1e6, bandwidth, copy_gb_per_s());
    if (neighbor) {
        printf(" two_programs=%.2f", median(programs, ROUNDS / 3));
        kill(neighbor->pid, SIGTERM);
        waitpid(neighbor->pid, NULL, 0);
    }
    printf("\n");
    return 0;
}
