/* parallel.c - section 10 of cnn.c: all-reduce, all-gather and broadcast between threads, and
   the overlap of communication with backward. */

/* ---- The ring -------------------------------------------------------------------------------- */

enum { MOST_RANKS = 6, RING_NUMBERS = 64 };

// One rank of a ring under test, and what it has.
typedef struct RingRank {
    Communicator comm;
    real numbers[RING_NUMBERS];
    size_t gathered[MOST_RANKS];
    Range range;
} RingRank;

static const Settings ring_settings = {.timeout = 60};

static void *ring_thread(void *argument) {
    RingRank *r = argument;
    all_reduce(&r->comm, r->numbers, r->range);
    r->gathered[r->comm.rank] = 100 + r->comm.rank;
    all_gather(&r->comm, r->gathered, sizeof *r->gathered);
    return NULL;
}

static void *broadcast_thread(void *argument) {
    RingRank *r = argument;
    broadcast(&r->comm, r->numbers, r->range.count);
    return NULL;
}

// Runs `body` on all ranks of a new team, each in a thread.
static void run_ring(RingRank *ranks, size_t world, void *(*body)(void *)) {
    static Net net;
    Team team = {0};
    pthread_t threads[MOST_RANKS];
    team_init(&team);
    net.kernels = &fast_kernels;
    net.device = &cpu_device;
    for (size_t r = 0; r < world; r++) {
        ranks[r].comm = (Communicator){.rank = r, .world = world, .team = &team, .net = &net};
        ranks[r].comm.settings = &ring_settings;
        team.comms[r] = &ranks[r].comm;
    }
    for (size_t r = 0; r < world; r++)
        if (pthread_create(&threads[r], NULL, body, &ranks[r]) != 0)
            fail("no thread");
    for (size_t r = 0; r < world; r++)
        pthread_join(threads[r], NULL);
}

// Ranges of any size, also smaller than the ring: the sum inside, the same bits on all ranks,
// nothing changed outside.
static void test_all_reduce(void) {
    static RingRank ranks[MOST_RANKS];
    for (size_t round = 0; round < 60; round++) {
        size_t world = draw_size(2, MOST_RANKS), first = draw_size(0, 9);
        Range range = {first, draw_size(0, RING_NUMBERS - 10)};
        real want[RING_NUMBERS], before[MOST_RANKS][RING_NUMBERS], bound[RING_NUMBERS];
        for (size_t i = 0; i < RING_NUMBERS; i++) {
            double sum = 0, size = 0;
            for (size_t r = 0; r < world; r++) {
                before[r][i] = ranks[r].numbers[i] = draw_real();
                sum += (double)before[r][i];
                size += fabs((double)before[r][i]);
            }
            want[i] = (real)sum;
            bound[i] = (real)((double)world * epsilon * size);
        }
        for (size_t r = 0; r < world; r++)
            ranks[r].range = range;
        run_ring(ranks, world, ring_thread);
        double sent = 0;
        snprintf(context, sizeof context, "%zu ranks, %zu numbers from %zu on", world, range.count,
                 first);
        for (size_t r = 0; r < world; r++) {
            const real *got = ranks[r].numbers;
            sent += ranks[r].comm.bytes_sent;
            check_tensor("sum", got + first, want + first, bound + first, range.count);
            check_tensor("rank 0's", got + first, ranks[0].numbers + first, NULL, range.count);
            check_tensor("before", got, before[r], NULL, first);
            check_tensor("behind", got + first + range.count, before[r] + first + range.count, NULL,
                         RING_NUMBERS - first - range.count);
            for (size_t k = 0; k < world; k++)
                if (ranks[r].gathered[k] != 100 + k)
                    fail("rank %zu gathered %zu from rank %zu", r, ranks[r].gathered[k], k);
        }
        if (sent != 2. * (double)((world - 1) * range.count * sizeof(real)))
            fail("all ranks together sent %g bytes", sent);
    }
    verdict("ring: all-reduce and all-gather");
}

static void test_broadcast(void) {
    static RingRank ranks[MOST_RANKS];
    for (size_t world = 2; world <= MOST_RANKS; world++) {
        for (size_t r = 0; r < world; r++) {
            for (size_t i = 0; i < RING_NUMBERS; i++)
                ranks[r].numbers[i] = draw_real();
            ranks[r].range = (Range){0, RING_NUMBERS};
        }
        real want[RING_NUMBERS];
        memcpy(want, ranks[0].numbers, sizeof want);
        run_ring(ranks, world, broadcast_thread);
        for (size_t r = 0; r < world; r++)
            check_tensor("rank 0's", ranks[r].numbers, want, NULL, RING_NUMBERS);
    }
    verdict("ring: broadcast");
}

// A network that learns with others, and the messages of gradients that it received.
typedef struct Learner {
    Run run;
    Kernels kernels;
    Device device;
    size_t received, awaited; // awaited: backward goes no further until so many have come
    size_t beside;            // that came during backward, not after it
    bool late;                // they did not come
    double exposed_s;         // how long the others let a step wait
    uint64_t hash;
} Learner;

static Learner learners[2];
static _Thread_local Learner *learner; // whose steps this thread takes
static const double message_s = .002;

// A link that takes its time for each message.
static void slow_receive(size_t device, real *to, const real *from, size_t count, bool add,
                         real *buffer) {
    naive_kernels.device->receive(device, to, from, count, add,
                                  buffer); // at once: are they complete?
    nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * message_s)}, NULL);
    __atomic_fetch_add(&learners[device].received, 1, __ATOMIC_SEQ_CST);
}

// Backward comes to its convolutions last: a bucket is complete by then, and has time to go around.
static void patient_conv2d_backward(Work w) {
    const double end = now() + 20;
    while (__atomic_load_n(&learner->received, __ATOMIC_SEQ_CST) < learner->awaited) {
        learner->late |= now() > end;
        if (learner->late)
            break;
        nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
    }
    naive_kernels.layers[CONV2D].backward(w);
}

enum { LEARN_STEPS = 3, LEARN_BATCH = 4, BUCKETS = 2, MESSAGES = 2 }; // MESSAGES: of a bucket

static void *learner_thread(void *argument) {
    learner = argument;
    Run *run = &learner->run;
    Net *net = &run->net;
    const DatasetInfo info = dataset_for(find_model("mnist"), "synthetic");
    Dataset data = {.info = &info};
    set_num_threads(1);
    make_synthetic(&data, TRAINING_SET, LEARN_STEPS * 2 * LEARN_BATCH);
    net_build(net, find_model("mnist"), &info, &run->settings, &learner->kernels);
    plan_net(net, LEARN_BATCH, 0);
    net_alloc(net);
    init_weights(net, 1);
    real *state = must_alloc(2 * net->param_size * sizeof(real), "a test");
    Consumer consumer = {
        .device = &learner->device, .rank = run->comm.rank, .ranks = run->comm.world};
    plan_loader(&run->train_loader, &data, LEARN_BATCH, 1, NULL, consumer);
    comm_plan(&run->comm, net, &run->train_loader);
    memory_plan_alloc(&run->comm.plan);
    comm_start(&run->comm);
    loader_start(&run->train_loader, 1, 1, 0);
    for (const Batch *batch; (batch = next_batch(&run->comm));) {
        load_batch(&run->comm, batch, 1);
        forward(net, batch->n, &net->step->key);
        batch_loss(&run->comm, batch);
        const size_t before = learner->received;
        learner->awaited = before + (run->settings.overlap ? MESSAGES : 0);
        backward(net, batch->n);
        learner->beside += __atomic_load_n(&learner->received, __ATOMIC_SEQ_CST) - before;
        const double end = now();
        reduce_gradients(&run->comm);
        learner->exposed_s += now() - end;
        optimizer_step(net, state);
    }
    learner->hash = hash_weights(net);
    comm_free(&run->comm);
    loader_free(&run->train_loader);
    memory_plan_free(&net->plan);
    free(state);
    free_dataset(&data);
    return NULL;
}

// Two learners; returns what rank 0 measured, with the messages of both.
static Learner learn(bool overlap) {
    Team team = {0};
    pthread_t threads[2];
    team_init(&team);
    memset(learners, 0, sizeof learners);
    for (size_t r = 0; r < 2; r++) {
        Learner *l = &learners[r];
        l->kernels = naive_kernels;
        l->kernels.device = &l->device;
        l->device = cpu_device;
        l->device.receive = slow_receive;
        l->kernels.layers[CONV2D].backward = patient_conv2d_backward;
        parse_options(&l->run.settings, 1, (char *[]){"cnn"});
        l->run.settings.overlap = overlap;
        l->run.settings.bucket_mb = 1;
        l->run.comm = (Communicator){
            .rank = r, .world = 2, .device_number = r, .team = &team, .settings = &l->run.settings};
        team.comms[r] = &l->run.comm;
    }
    for (size_t r = 0; r < 2; r++)
        if (pthread_create(&threads[r], NULL, learner_thread, &learners[r]) != 0)
            fail("no thread");
    for (size_t r = 0; r < 2; r++)
        pthread_join(threads[r], NULL);
    if (learners[0].hash != learners[1].hash)
        fail("the two ranks have other weights");
    for (size_t r = 0; r < 2; r++)
        if (learners[r].late)
            fail("rank %zu: backward waited 20 s for a bucket to go around beside it", r);
    Learner both = learners[0];
    both.received += learners[1].received;
    both.beside += learners[1].beside;
    return both;
}

// Messages that come beside backward are those that no step waits for. Backward waits for the first
// bucket's: so this does not depend on who is faster today.
static void test_overlap(void) {
    const size_t all = 2 * LEARN_STEPS * BUCKETS * MESSAGES;
    Learner off = learn(false), on = learn(true);
    if (off.hash != on.hash)
        fail("the weights depend on when gradients are added up");
    if (off.received != all || on.received != all)
        fail("%zu and %zu messages, expected %zu", off.received, on.received, all);
    if (off.beside > 0 || off.exposed_s < (double)all / 2 * message_s)
        fail("without overlap %zu messages came beside backward, and the steps waited %g s, "
             "expected 0 and at least %g s",
             off.beside, off.exposed_s, (double)all / 2 * message_s);
    if (on.beside < all / BUCKETS)
        fail("with overlap %zu messages came beside backward, expected at least %zu", on.beside,
             all / BUCKETS);
    verdict("ddp: overlap hides communication, and changes no bit");
}

static void test_parallel(void) {
    test_all_reduce();
    test_broadcast();
    test_overlap();
}
