/* crossover.c - lab 4: from which batch size on is a GPU faster than the CPU?

   Times the forward of two layers of the cifar network, its first convolution and its ReLU, on the
   CPU (its best kernels) and on the GPU (the lab's kernels, --kernels naive) for batches of 1, 2,
   4 ... 256 images: once with the images already on the GPU, once with the copies to it and back.

     build/crossover FILE.csv [LARGEST]     LARGEST: the largest batch; default 256

   Prints a table, then a line of key=value for each layer; `none`: the CPU is never slower. */
#define CNN_NO_MAIN
#include "../../cnn.c"

enum { ROUNDS = 7, TIMES = 20, MOST_BATCHES = 20 };

// A layer's forward on one device.
typedef struct Job {
    Net *net;
    size_t row, n;         // of the layer table; images
    real *images, *answer; // on the host, to be copied; NULL: no copies
} Job;

/* Seconds per call of work(job), the mean of `times` calls. Neither the device's first call, which
   is slower, nor work queued before is included. d: the device that work() computes on.
   (Not static, since make check calls it from another file.) */
double seconds_of(const Device *d, void (*work)(void *job), void *job, size_t times) {
    /* LAB 4.4 BEGIN seconds_of */
    work(job);
    d->synchronize();
    double begin = now();
    for (size_t i = 0; i < times; i++)
        work(job);
    d->synchronize();
    return (now() - begin) / (double)times;
    /* LAB 4.4 END */
}

static void compute(void *argument) {
    Job *job = argument;
    const Device *d = job->net->device;
    const Layer *l = &job->net->layers[job->row];
    if (job->images)
        d->copy(output(job->net, l->input), job->images, job->n * shape_size(l->in) * sizeof(real));
    forward_row(job->net, job->row, job->n, NULL);
    if (job->images)
        d->copy(job->answer, output(job->net, job->row),
                job->n * shape_size(l->out) * sizeof(real));
}

// Microseconds; the median of ROUNDS measurements (one in the emulator, whose times mean nothing).
static double microseconds(Job *job, bool emulated) {
    double seconds[ROUNDS];
    size_t rounds = emulated ? 1 : ROUNDS;
    for (size_t i = 0; i < rounds; i++)
        seconds[i] = seconds_of(job->net->device, compute, job, emulated ? 1 : TIMES);
    return 1e6 * median(seconds, rounds);
}

// The cifar network on a device, with its kernels in `apart`, which fuse no layers
static void setup_net(Net *net, const Run *run, const Kernels *k, Kernels *apart, size_t batch) {
    *apart = *k;
    apart->fuse = fuse_nothing;
    net_build(net, run->model, &run->dataset_info, &run->settings, apart);
    plan_net(net, batch, 0);
    net_alloc(net);
    init_weights(net, 1);
}

// The batch size from which on all times are below the CPU's; 0: none.
static size_t crossover(const double *times, const double *cpu, size_t count) {
    size_t first = count;
    while (first > 0 && times[first - 1] < cpu[first - 1])
        first--;
    return first < count ? (size_t)1 << first : 0;
}

static void print_crossover(const char *name, const double *times, const double *cpu,
                            size_t count) {
    size_t batch = crossover(times, cpu, count);
    if (batch)
        printf(" %s=%zu", name, batch);
    else
        printf(" %s=none", name);
}

static void measure(FILE *csv, Net *cpu, Net *gpu, size_t row, size_t largest, bool emulated) {
    const Layer *l = &gpu->layers[row];
    const char *name = *l->name ? l->name : "relu1";
    size_t most = largest * (shape_size(l->in) + shape_size(l->out)), count = 0;
    real *host = gpu->device->pinned_alloc(most * sizeof *host);
    if (!host)
        die_no_memory(most * sizeof *host, "the images to copy");
    double us[3][MOST_BATCHES];
    for (size_t n = 1; n <= largest; n *= 2, count++) {
        Job on_cpu = {cpu, row, n, NULL, NULL}, on_gpu = {gpu, row, n, NULL, NULL};
        Job copied = {gpu, row, n, host, host + largest * shape_size(l->in)};
        us[0][count] = microseconds(&on_cpu, emulated);
        us[1][count] = microseconds(&on_gpu, emulated);
        us[2][count] = microseconds(&copied, emulated);
        size_t bytes = n * (shape_size(l->in) + shape_size(l->out)) * sizeof(real);
        printf("%-6s %5zu %10.3f %12zu %10.1f %10.1f %10.1f\n", name, n,
               (double)n * forward_flops(l) / 1e6, bytes, us[0][count], us[1][count], us[2][count]);
        fprintf(csv, "%s,%zu,%.3f,%zu,%.1f,%.1f,%.1f,%s\n", name, n,
                (double)n * forward_flops(l) / 1e6, bytes, us[0][count], us[1][count], us[2][count],
                emulated ? "true" : "false");
        fflush(stdout);
    }
    printf("crossover layer=%s emulated=%s", name, emulated ? "true" : "false");
    if (!emulated) { // else the times mean nothing
        print_crossover("without_copies", us[1], us[0], count);
        print_crossover("with_copies", us[2], us[0], count);
    }
    printf("\n");
    gpu->device->pinned_release(host);
}

int main(int argc, char **argv) {
    static Run run;
    static Net cpu, gpu;
    Kernels cpu_apart, gpu_apart;
    DeviceInfo d = {0};
    AtomicFile file;
    const char *reason;
    size_t largest = argc > 2 ? strtoul(argv[2], NULL, 10) : 256;
    if (argc < 2 || argc > 3 || largest < 1 || largest > 1 << (MOST_BATCHES - 1))
        die(EXIT_USAGE, "usage: crossover FILE.csv [LARGEST], LARGEST being the last batch");
    if (cuda_kernels(0)->device->count(&reason) == 0)
        die(1, "no GPU (%s); in the emulator: make crossover EMULATE=1", reason);
    cuda_kernels(0)->device->use(0, 0, die);
    cuda_kernels(0)->device->describe(&d);
    setup_settings(&run, 3, (char *[]){"crossover", "--model", "cifar"});
    run.dataset_info = dataset_for(run.model, "synthetic");
    setup_net(&cpu, &run, cpu_kernels[CPU_KERNELS - 1], &cpu_apart, largest);
    setup_net(&gpu, &run, cuda_kernels(0), &gpu_apart, largest);
    atomic_open(&file, argv[1]);
    fprintf(file.stream, "layer,batch,mflop,bytes_copied,cpu_us,gpu_us,gpu_copies_us,emulated\n");
    printf("Device: %s%s\n", d.name, d.emulated ? "; its times mean nothing" : "");
    printf("%-6s %5s %10s %12s %10s %10s %10s\n", "layer", "batch", "MFLOP", "bytes copied",
           "CPU us", "GPU us", "... copies");
    for (size_t row = 1; row <= 2; row++)
        measure(file.stream, &cpu, &gpu, row, largest, d.emulated);
    atomic_commit(&file);
    return 0;
}
