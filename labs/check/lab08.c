/* lab08.c - tests of the ring all-reduce and of the sampler for `make check LAB=8`: `lab08 TEST`.

   Each rank is a process of its own, of the program with the student's parts (apart.h). It has its
   own numbers, but neither the others' nor the right results. The checker forwards its messages,
   counts them and checks what it returns. */

#define _GNU_SOURCE 1
#define CNN_NO_MAIN
#define CNN_NO_KERNELS // no layer is computed
#define CNN_MPI        // ranks exchange messages; lab08_mpi/mpi.h declares them
#include "../../cnn.c"
#include "apart.h"
#include "report.h"
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum { MOST_RANKS = 8, MOST_NUMBERS = 1024, PATIENCE_MS = 20000 };

// What a loader is asked for
typedef struct Sampling {
    size_t images, epoch, batch;
    uint64_t seed;
} Sampling;

// What a rank has to do: reduce a range of its numbers with the others, or load its images.
typedef enum { REDUCE, SAMPLE } Job;
typedef struct Task {
    Job job;
    size_t rank, world;
    Range range;
    size_t count; // of the numbers
    real numbers[MOST_NUMBERS];
    Sampling sampling;
} Task;

/* ---- A rank's side --------------------------------------------------------------------------- */

typedef enum { EXCHANGE, RESULT } Kind;

// What a rank tells the checker; `sent` bytes follow.
typedef struct Message {
    Kind kind;
    size_t sent, expected; // EXCHANGE: bytes to the right neighbor, and those from the left one
} Message;

static int wire = SHARED_FILE; // to the checker
static struct {
    void *to;
    size_t bytes;
} receiving;

static void put_bytes(const void *data, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        ssize_t n = write(wire, (const char *)data + at, bytes - at);
        if (n <= 0)
            _exit(1);
        at += (size_t)n;
    }
}

// Reads all bytes, or returns false at the end of the stream.
static bool get_bytes(int from, void *data, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        ssize_t n = read(from, (char *)data + at, bytes - at);
        if (n <= 0)
            return false;
        at += (size_t)n;
    }
    return true;
}

static void put_message(Kind kind, const void *data, size_t bytes, size_t expected) {
    Message m;
    memset(&m, 0, sizeof m);
    m.kind = kind, m.sent = bytes, m.expected = expected;
    put_bytes(&m, sizeof m);
    put_bytes(data, bytes);
}

enum { SENDING, RECEIVING };

int MPI_Irecv(void *data, int bytes, MPI_Datatype type, int from, int tag, MPI_Comm comm,
              MPI_Request *request) {
    (void)type, (void)from, (void)tag, (void)comm;
    receiving.to = data, receiving.bytes = (size_t)bytes;
    *request = RECEIVING;
    return 0;
}

int MPI_Isend(const void *data, int bytes, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *request) {
    (void)type, (void)to, (void)tag, (void)comm;
    put_message(EXCHANGE, data, (size_t)bytes, receiving.bytes);
    *request = SENDING;
    return 0;
}

int MPI_Test(MPI_Request *request, int *done, MPI_Status *status) {
    (void)status;
    if (*request == RECEIVING && !get_bytes(wire, receiving.to, receiving.bytes))
        _exit(1);
    *done = 1;
    return 0;
}

static int no_mpi(void) {
    _exit(1); // ranks are not started by MPI
}

int MPI_Init_thread(int *argc, char ***argv, int required, int *provided) {
    (void)argc, (void)argv, (void)required, (void)provided;
    return no_mpi();
}

int MPI_Finalize(void) {
    return no_mpi();
}

int MPI_Abort(MPI_Comm comm, int status) {
    (void)comm, (void)status;
    return no_mpi();
}

int MPI_Comm_rank(MPI_Comm comm, int *rank) {
    (void)comm, (void)rank;
    return no_mpi();
}

int MPI_Comm_size(MPI_Comm comm, int *size) {
    (void)comm, (void)size;
    return no_mpi();
}

int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm *part) {
    (void)comm, (void)type, (void)key, (void)info, (void)part;
    return no_mpi();
}

int MPI_Comm_free(MPI_Comm *comm) {
    (void)comm;
    return no_mpi();
}

/* ---- The checker's side ---------------------------------------------------------------------- */

// The processes of one test, and what they have sent.
static struct {
    size_t world;
    pid_t pid[MOST_RANKS];
    int wire[MOST_RANKS];
    Message message[MOST_RANKS];
    real payload[MOST_RANKS][MOST_NUMBERS];
    size_t steps;            // exchanges of all ranks
    size_t sent[MOST_RANKS]; // bytes that a rank has sent, in all steps
    size_t largest;          // bytes of the largest message
    char what[128];          // for messages: this case
} ranks;

// Starts a process for each rank. fill() adds what a rank needs besides its place.
static void start_ranks(size_t world, Job job, void (*fill)(Task *)) {
    ranks.world = world;
    ranks.steps = ranks.largest = 0;
    memset(ranks.sent, 0, sizeof ranks.sent);
    fflush(stdout);
    for (size_t r = 0; r < world; r++) {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
            wrong("no socket");
        ranks.pid[r] = start_apart("./lab08", ends[1]);
        close(ends[1]);
        Task task = {.job = job, .rank = r, .world = world};
        fill(&task);
        if (write(ends[0], &task, sizeof task) != sizeof task)
            wrong("rank %zu cannot be started", r);
        ranks.wire[r] = ends[0];
    }
}

static _Noreturn void stop_ranks(void) {
    for (size_t r = 0; r < ranks.world; r++)
        kill(ranks.pid[r], SIGKILL);
    _exit(1);
}

// As wrong(), and ends the ranks.
#define WRONG(...)                              \
    do {                                        \
        fprintf(verdict(), "%s: ", ranks.what); \
        fprintf(verdict(), __VA_ARGS__);        \
        fputs("\n", verdict());                 \
        fflush(verdict());                      \
        stop_ranks();                           \
    } while (0)

static _Noreturn void explain_end(size_t r) {
    int status = 0;
    waitpid(ranks.pid[r], &status, 0);
    if (WIFSIGNALED(status))
        WRONG("rank %zu was ended by signal %d (%s): an access outside of an array?", r,
              WTERMSIG(status), strsignal(WTERMSIG(status)));
    WRONG("rank %zu ended early; does your code end the program?", r);
}

// Reads the next message of a rank.
static void hear(size_t r) {
    struct pollfd ready = {.fd = ranks.wire[r], .events = POLLIN};
    Message *m = &ranks.message[r];
    if (poll(&ready, 1, PATIENCE_MS) == 0)
        WRONG("rank %zu neither sends nor returns for %d s: an endless loop?", r,
              PATIENCE_MS / 1000);
    if (!get_bytes(ranks.wire[r], m, sizeof *m))
        explain_end(r);
    if (m->sent > sizeof ranks.payload[r])
        WRONG("rank %zu sends %zu bytes, more than all its numbers", r, m->sent);
    if (!get_bytes(ranks.wire[r], ranks.payload[r], m->sent))
        explain_end(r);
}

// Forwards what all ranks have sent in this step to their right neighbors.
static void forward_messages(void) {
    const size_t n = ranks.world;
    for (size_t r = 0; r < n; r++) {
        size_t left = (r + n - 1) % n, sent = ranks.message[left].sent;
        ranks.sent[left] += sent;
        ranks.largest = max_size(ranks.largest, sent);
        if (sent != ranks.message[r].expected)
            WRONG("step %zu: rank %zu sends %zu numbers, but its right neighbor, rank %zu, expects "
                  "%zu: both have to mean the same part",
                  ranks.steps, left, sent / sizeof(real), r,
                  ranks.message[r].expected / sizeof(real));
    }
    for (size_t r = 0; r < n; r++) {
        size_t left = (r + n - 1) % n;
        wire = ranks.wire[r];
        put_bytes(ranks.payload[left], ranks.message[left].sent);
    }
    ranks.steps++;
}

// Takes part until all ranks have returned their results, which are in ranks.payload then.
static void serve_ranks(size_t most_steps) {
    for (;;) {
        size_t done = 0, finished = 0, waits = 0;
        for (size_t r = 0; r < ranks.world; r++) {
            hear(r);
            const bool returned = ranks.message[r].kind == RESULT;
            done += returned;
            *(returned ? &finished : &waits) = r;
        }
        if (done == ranks.world)
            break;
        if (done > 0)
            WRONG("rank %zu has returned after %zu steps, but rank %zu begins another one: all "
                  "ranks take the same number of steps",
                  finished, ranks.steps, waits);
        forward_messages();
        if (ranks.steps > most_steps)
            WRONG("the ranks have taken %zu steps and continue; expected at most %zu", ranks.steps,
                  most_steps);
    }
    for (size_t r = 0; r < ranks.world; r++) {
        close(ranks.wire[r]);
        waitpid(ranks.pid[r], NULL, 0);
    }
}

/* ---- The ring -------------------------------------------------------------------------------- */

// An array of numbers on each rank, the sum of a range of which is wanted.
static struct {
    Range range;
    size_t count; // of the array
} ring;
// A small generator, since rand() may be the student's.
static uint32_t draw_number(void) {
    static uint64_t state;
    if (state == 0)
        state = (uint64_t)time(NULL) << 20 ^ (uint64_t)getpid();
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

// For seeds: one that was cut to 32 bits is another one.
static uint64_t draw_large(void) {
    return (uint64_t)draw_number() << 32 | draw_number();
}

static uint64_t ring_seed;
static enum { COUNTS, INTEGERS, ROUNDED } ring_kind;

// The number i of a rank: 8^rank, so that a sum shows which ranks are in it and how often; a whole
// number below 1000; or a number of any size, whose sums are rounded.
static real number_of(size_t rank, size_t i) {
    uint32_t r[4];
    if (ring_kind == COUNTS)
        return (real)((size_t)1 << 3 * rank);
    philox4x32(r, (uint32_t)i, (uint32_t)rank, 0, DRAW_SHUFFLE, ring_seed);
    if (ring_kind == INTEGERS)
        return (real)(r[0] % 1000);
    return (real)((r[0] % 2 ? 1 : -1) * ldexp(1 + uniform(r[1]), (int)(r[2] % 24)));
}

static void fill_ring(Task *task) {
    task->range = ring.range;
    task->count = ring.count;
    for (size_t i = 0; i < ring.count; i++)
        task->numbers[i] = number_of(task->rank, i);
}

// In a rank
static void reduce_numbers(Task *task) {
    static real received[2][MOST_NUMBERS];
    static Settings settings = {.timeout = 60};
    static Net net = {.kernels = &naive_kernels, .device = &cpu_device};
    Communicator c = {.rank = task->rank, .world = task->world, .net = &net, .settings = &settings};
    c.send_buffer = received[0];
    c.receive_buffer = received[1];
    all_reduce(&c, task->numbers, task->range);
    put_message(RESULT, task->numbers, task->count * sizeof *task->numbers, 0);
}

// All ranks together reduce `count` numbers from `first` on, in an array that has more after them.
static void run_ring(size_t world, size_t first, size_t count) {
    ring.range = (Range){first, count};
    ring.count = first + count + 3;
    ring_seed = draw_number() + 1;
    snprintf(ranks.what, sizeof ranks.what, "%zu rank%s, %zu numbers", world, world == 1 ? "" : "s",
             count);
    start_ranks(world, REDUCE, fill_ring);
    serve_ranks(8 * world + 8);
}

static real total_of(size_t i) {
    real sum = 0;
    for (size_t r = 0; r < ranks.world; r++)
        sum += number_of(r, i);
    return sum;
}

// Which ranks are in a sum of 8^rank.
static _Noreturn void explain_counts(size_t rank, size_t i, double found) {
    char list[256] = "", *at = list;
    const double n = (double)ranks.world, sum = (double)total_of(i);
    if (found == sum / n || fabs(found - sum / n) < 1e-6 * sum)
        WRONG("rank %zu has the mean of all ranks' numbers, expected their sum: each gradient is "
              "already a part of the mean over the whole batch",
              rank);
    if (found != floor(found) || found < 0 || found >= pow(8, n))
        WRONG("number %zu of rank %zu is %g, expected the sum, %g", i - ring.range.first, rank,
              found, sum);
    for (size_t r = 0, left = (size_t)found; r < ranks.world; r++, left /= 8)
        if (left % 8 != 1)
            at += snprintf(at, (size_t)(list + sizeof list - at), "%s rank %zu's %zu times",
                           *list ? "," : "", r, left % 8);
    WRONG("on rank %zu, number %zu of %zu contains%s; expected each rank's once", rank,
          i - ring.range.first, ring.range.count, list);
}

static void check_numbers(void) {
    const Range whole = ring.range;
    for (size_t r = 0; r < ranks.world; r++) {
        const real *got = ranks.payload[r];
        for (size_t i = 0; i < ring.count; i++) {
            bool inside = i >= whole.first && i < whole.first + whole.count;
            real want = inside ? total_of(i) : number_of(r, i);
            if (got[i] == want)
                continue;
            if (!inside)
                WRONG("rank %zu has changed data[%zu], which is outside of the range %zu to %zu", r,
                      i, whole.first, whole.first + whole.count - 1);
            if (ring_kind == COUNTS)
                explain_counts(r, i, (double)got[i]);
            for (size_t k = 0; k < whole.count; k++)
                if (got[i] == total_of(whole.first + k))
                    WRONG("number %zu of rank %zu is the sum of the numbers %zu: parts are "
                          "exchanged",
                          i - whole.first, r, k);
            WRONG("number %zu of rank %zu is %g, expected the sum, %g; does each rank receive "
                  "the part that its left neighbor sends?",
                  i - whole.first, r, (double)got[i], (double)want);
        }
    }
}

// 2 (R - 1) steps in which every rank sends one of R parts.
static void check_traffic(void) {
    const size_t n = ranks.world, count = ring.range.count, part = ceil_div(count, n);
    size_t total = 0, most = 0;
    for (size_t r = 0; r < n; r++) {
        total += ranks.sent[r] / sizeof(real);
        if (ranks.sent[r] > ranks.sent[most])
            most = r;
    }
    if (ranks.largest > part * sizeof(real))
        WRONG("the sum is right, but a rank sends %zu numbers in one step; in a ring all-reduce it "
              "sends one of %zu parts, at most %zu",
              ranks.largest / sizeof(real), n, part);
    if (ranks.steps != 2 * (n - 1))
        WRONG("the sum is right, but it takes %zu steps; a ring needs 2 (R - 1) = %zu", ranks.steps,
              2 * (n - 1));
    if (total != 2 * (n - 1) * count)
        WRONG("the sum is right, but all ranks together send %zu numbers, rank %zu alone %zu; "
              "expected 2 (R - 1) P = %zu, each about 2 (R - 1) / R P = %.6g",
              total, most, ranks.sent[most] / sizeof(real), 2 * (n - 1) * count,
              2. * (double)((n - 1) * count) / (double)n);
}

static void reduce(size_t world, size_t first, size_t count) {
    for (ring_kind = COUNTS; ring_kind <= INTEGERS; ring_kind++) {
        run_ring(world, first, count);
        check_numbers();
        check_traffic();
    }
}

static void test_sum(void) {
    for (size_t world = 2; world <= MOST_RANKS; world++)
        for (size_t first = 0; first < 8; first += 5)
            reduce(world, first, world * (1 + draw_number() % 20));
}

static void test_odd(void) {
    static const size_t worlds[] = {2, 3, 4, 7};
    for (size_t w = 0; w < 4; w++)
        for (size_t count = 1; count < 3 * worlds[w]; count += 1 + count / 4)
            reduce(worlds[w], draw_number() % 7, count);
    reduce(5, 3, 803);
}

static void test_alone(void) {
    reduce(1, 0, 12);
    reduce(1, 4, 1);
    reduce(2, 0, 0);
    reduce(6, 2, 0);
}

// The same bits, although sums are rounded: another order gives others.
static void test_bits(void) {
    for (size_t world = 2; world <= MOST_RANKS; world++) {
        reduce(world, 0, 24);
        ring_kind = ROUNDED;
        run_ring(world, 0, 97);
        for (size_t r = 1; r < world; r++)
            for (size_t i = 0; i < ring.range.count; i++)
                if (ranks.payload[r][i] != ranks.payload[0][i])
                    WRONG("number %zu is %.9g on rank 0 and %.9g on rank %zu: a sum must be taken "
                          "once, in one order, and then be passed on",
                          i, (double)ranks.payload[0][i], (double)ranks.payload[r][i], r);
    }
}

// 2 (R - 1) / R of the data: nearly the same for many ranks as for two.
static void test_traffic(void) {
    for (size_t world = 2; world <= MOST_RANKS; world++)
        reduce(world, 0, 840); // which all of them divide
    reduce(3, 1, 1000);
}

/* ---- The sampler ----------------------------------------------------------------------------- */

// What an image shows that is none: a place of `order` that was not written, or one beyond its end
enum { MOST_IMAGES = 200, NEVER_WRITTEN = 65535, BEYOND = 65534 };

static Sampling sampling;

// What a loader returns for each image of a rank
typedef struct Sample {
    uint16_t image;    // its number in the data set
    uint16_t position; // in the permutation, as dropout and augmentation see it
} Sample;

/* The images show their numbers. Two more, after them, say that a place of `order` has not been
   written, or is beyond its end. `order` ends where memory that can be written ends. */
static void load_images_of(const Task *task) {
    static uint8_t bytes[2 * (MOST_IMAGES + 2)], labels[MOST_IMAGES + 2];
    static DatasetInfo info = {.name = "numbered", .shape = {1, 2, 1}, .classes = 10, .std = {1}};
    static Sample found[MOST_IMAGES];
    const Sampling *s = &task->sampling;
    const size_t n = s->images, others = task->world - 1;
    const size_t page = 4096, pages = 8;
    const Dataset data = {&info, n, bytes, labels};
    const Consumer consumer = {.device = &cpu_device, .rank = task->rank, .ranks = task->world};
    size_t count = 0;
    Loader l;
    for (size_t i = 0; i < n + 2; i++) {
        const size_t shown = i < n ? i : i == n ? NEVER_WRITTEN : BEYOND;
        bytes[2 * i] = (uint8_t)(shown % 256), bytes[2 * i + 1] = (uint8_t)(shown / 256);
    }
    loader_plan(&l, &data, s->batch, 1, AUGMENT_NONE, consumer);
    loader_init(&l);
    char *memory =
        mmap(NULL, pages * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        _exit(1);
    uint32_t *end = (uint32_t *)(memory + page);
    for (size_t i = 0; i < (pages - 1) * page / sizeof *end; i++)
        end[i] = (uint32_t)n + 1;
    if (mprotect(end, (pages - 1) * page, PROT_READ) != 0)
        _exit(1);
    l.order = end - (n + others);
    for (size_t i = 0; i < n + others; i++)
        l.order[i] = (uint32_t)n;
    loader_start(&l, s->seed, s->epoch, 0);
    for (const Batch *b; (b = loader_next(&l));)
        for (size_t i = 0; i < b->n && count < MOST_IMAGES; i++, count++) {
            unsigned image = (unsigned)lround((double)b->images[2 * i] * 255);
            unsigned second = (unsigned)lround((double)b->images[2 * i + 1] * 255);
            found[count].image = (uint16_t)(image + 256 * second);
            found[count].position = (uint16_t)position_of(b->key, i);
        }
    put_message(RESULT, found, count * sizeof *found, 0);
}

static void fill_sampling(Task *task) {
    task->sampling = sampling;
}

static uint32_t permutation[MOST_IMAGES];

static void permute(size_t epoch) {
    for (size_t i = 0; i < sampling.images; i++)
        permutation[i] = (uint32_t)i;
    if (epoch > 0)
        shuffle(permutation, sampling.images, sampling.seed, epoch);
}

// The image that comes k-th on a rank
static size_t image_of(size_t rank, size_t k) {
    return permutation[(k * ranks.world + rank) % sampling.images];
}

static size_t share_of(size_t rank) {
    size_t n = sampling.images, world = ranks.world;
    return sampling.epoch > 0 ? ceil_div(n, world) : (n + world - 1 - rank) / world;
}

// How many of a rank's images are those of this epoch's permutation, in its order
static size_t agreement(size_t rank, const Sample *found, size_t count, size_t epoch) {
    size_t equal = 0;
    permute(epoch);
    for (size_t k = 0; k < count; k++)
        equal += found[k].image == image_of(rank, k);
    permute(sampling.epoch);
    return equal;
}

// Whether a rank has `count` neighbors of the permutation
static bool is_block(size_t rank, const Sample *found, size_t count) {
    size_t equal = 0;
    for (size_t k = 0; k < count; k++)
        equal += found[k].image == permutation[(rank * count + k) % sampling.images];
    return equal == count;
}

// Says which rule of the sampler the rank has broken.
static _Noreturn void explain_images(size_t r, const Sample *found, size_t count, size_t k) {
    const size_t n = sampling.images, want = image_of(r, k), world = ranks.world;
    size_t place = 0;
    while (place < n && permutation[place] != found[k].image)
        place++;
    if (sampling.epoch > 0 && agreement(r, found, count, 0) == count)
        WRONG("rank %zu has the images in the order of the file; in training they are shuffled", r);
    if (count > 1 && is_block(r, found, count))
        WRONG("rank %zu has neighbors, positions %zu, %zu, ...; rank r has r, r + R, ..., "
              "so that a step's images are those that one device would have",
              r, r * count, r * count + 1);
    if (sampling.epoch == 0 && place < n)
        WRONG("rank %zu: image %zu is number %zu of the data set, expected %zu: epoch 0 is for "
              "testing, which keeps the order of the file",
              r, k, (size_t)found[k].image, want);
    for (size_t e = 1; e < sampling.epoch + 3; e++)
        if (e != sampling.epoch && count > 4 && agreement(r, found, count, e) == count)
            WRONG("rank %zu has the permutation of epoch %zu: shuffle by the number of the epoch "
                  "(PyTorch: sampler.set_epoch)",
                  r, e);
    if (found[k].image == BEYOND)
        WRONG(
            "rank %zu: image %zu is at position %zu, beyond the %zu places of order; expected "
            "position %zu: loader->key has the position of a rank's first image and the stride, "
            "the distance between two of its positions; loader->rank_images is how many images it "
            "has",
            r, k, (size_t)found[k].position, n + world - 1, k * world + r);
    if (found[k].image == NEVER_WRITTEN || place == n)
        WRONG("rank %zu: image %zu is at a place of `order` that was never written; expected "
              "position %zu, which is number %zu: after the last image, the first ones are "
              "repeated, as often as needed",
              r, k, k * world + r, want);
    WRONG(
        "rank %zu: image %zu should be position %zu of the permutation, number %zu; found position "
        "%zu, number %zu",
        r, k, (k * world + r) % n, want, place, (size_t)found[k].image);
}

static void check_share(size_t r, size_t count) {
    const size_t n = sampling.images, world = ranks.world, want = share_of(r);
    if (count == want)
        return;
    if (sampling.epoch == 0)
        WRONG(
            "testing: rank %zu has %zu images, expected %zu: each image is tested once, none twice",
            r, count, want);
    WRONG("rank %zu has %zu images, expected %zu = %zu / %zu, rounded up: all ranks have equally "
          "many, or one of them waits for the others forever, and no image is left out",
          r, count, want, n, world);
}

static void sample(size_t world, size_t images, size_t epoch) {
    sampling.images = images, sampling.epoch = epoch;
    sampling.batch = 1 + draw_number() % 9;
    snprintf(ranks.what, sizeof ranks.what, "%zu rank%s, %zu image%s, epoch %zu", world,
             world == 1 ? "" : "s", images, images == 1 ? "" : "s", epoch);
    start_ranks(world, SAMPLE, fill_sampling);
    serve_ranks(0);
    permute(epoch);
    for (size_t r = 0; r < world; r++)
        check_share(r, ranks.message[r].sent / sizeof(Sample));
    for (size_t r = 0; r < world; r++) {
        Sample found[MOST_IMAGES];
        const size_t count = ranks.message[r].sent / sizeof *found;
        memcpy(found, ranks.payload[r], count * sizeof *found);
        for (size_t k = 0; k < count; k++)
            if (found[k].image != image_of(r, k))
                explain_images(r, found, count, k);
        for (size_t k = 0; k < count; k++)
            if (found[k].position != k * world + r)
                WRONG("rank %zu has the right images, but its image %zu is said to be at position "
                      "%zu instead of %zu: loader->key has the position of its first image and the "
                      "stride, the distance between two of its positions",
                      r, k, (size_t)found[k].position, k * world + r);
    }
}

static void test_shares(void) {
    for (size_t world = 1; world <= 6; world++)
        for (size_t epoch = 1; epoch <= 3; epoch++) {
            sampling.seed = draw_large();
            sample(world, world * (5 + draw_number() % 20), epoch);
        }
}

static void test_remainder(void) {
    static const size_t worlds[] = {2, 3, 5, 8};
    sampling.seed = draw_large();
    for (size_t w = 0; w < 4; w++)
        for (size_t images = 4 * worlds[w] + 1; images < 5 * worlds[w]; images++)
            sample(worlds[w], images, 1 + images % 2);
}

static void test_few(void) {
    sampling.seed = draw_large();
    for (size_t world = 2; world <= MOST_RANKS; world += 3)
        for (size_t images = 1; images < world; images++)
            sample(world, images, 2);
    sample(1, 1, 1);
}

static void test_testing(void) {
    sampling.seed = draw_large();
    for (size_t world = 1; world <= 7; world += 2)
        for (size_t images = 9; images < 12; images++)
            sample(world, images, 0);
    sample(8, 3, 0);
}

static const NamedTest tests[] = {{"sum", test_sum},
                                  {"odd", test_odd},
                                  {"alone", test_alone},
                                  {"bits", test_bits},
                                  {"traffic", test_traffic},
                                  {"shares", test_shares},
                                  {"remainder", test_remainder},
                                  {"few", test_few},
                                  {"testing", test_testing}};

static _Noreturn void be_a_rank(void) {
    static Task task;
    open_no_more();
    if (!get_bytes(wire, &task, sizeof task))
        _exit(1);
    if (task.job == REDUCE)
        reduce_numbers(&task);
    else
        load_images_of(&task);
    fflush(stdout);
    _exit(0);
}

// Runs the tests that are named, then sends the checker's token.
int main(int argc, char **argv) {
    if (is_worker(argc, argv))
        be_a_rank();
    signal(SIGPIPE, SIG_IGN);
    run_named(tests, sizeof tests / sizeof *tests, argc, argv);
    send_token();
    return 0;
}
