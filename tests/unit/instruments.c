/* instruments.c - section 13 of cnn.c: the rows between whose marks --layers measures, and the
   times of steps. */

// The rows between whose marks a kernel ran: forward, backward.
static size_t kernels_of_row[MAX_LAYERS][2], last_mark;

static void note_mark(size_t mark) {
    last_mark = mark;
}

static void note_kernel(void) {
    const size_t mark = last_mark - ROW_MARKS;
    kernels_of_row[mark / 4][mark % 4 / 2]++; // a row has two marks in each pass
}

static void note_forward(Work w) {
    note_kernel();
    fast_kernels.layers[w.l->kind].forward(w);
}

static void note_backward(Work w) {
    note_kernel();
    fast_kernels.layers[w.l->kind].backward(w);
}

// --layers: what fused rows do runs, and is timed, with the row that they are fused into.
static void test_layer_times(const char *model, const char *dataset, size_t shown) {
    static Net net;
    const DatasetInfo info = dataset_for(find_model(model), dataset);
    Kernels noting = fast_kernels;
    Device device = cpu_device;
    size_t rows = 0;
    noting.device = &device;
    device.mark = note_mark;
    for (size_t kind = 0; kind < KINDS; kind++)
        if (noting.layers[kind].forward) {
            noting.layers[kind].forward = note_forward;
            noting.layers[kind].backward = note_backward;
        }
    net_build(&net, find_model(model), &info, &plain, &noting);
    plan_net(&net, 2, 0);
    net_alloc(&net);
    init_weights(&net, 1);
    memset(kernels_of_row, 0, sizeof kernels_of_row);
    net.marks_rows = true;
    forward(&net, 2, &any_key);
    loss_and_gradient(&net, 2);
    backward(&net, 2);
    for (size_t i = 1; i < net.layer_count; i++) {
        const bool fused = net.row_plans[i].mode == FUSED_INTO_EARLIER;
        rows += !fused;
        for (size_t way = 0; way < 2; way++)
            if ((kernels_of_row[i][way] > 0) == fused)
                fail("%s row %zu, %s: %zu kernels, though it is%s fused", model, i,
                     way ? "backward" : "forward", kernels_of_row[i][way], fused ? "" : " not");
    }
    if (rows != shown)
        fail("%s: %zu rows, expected %zu", model, rows, shown);
    memory_plan_free(&net.plan);
    verdict("layer times: fused rows count, %s", model);
}

// --layers: a dropout saves a byte for each output, in every precision.
static void test_bytes_of_masks(void) {
    static Net net;
    const size_t outputs = 6, images = 2;
    const Shape shape = {1, 1, outputs};
    const size_t element_bytes[] = {sizeof(float), sizeof(uint16_t)};
    net.layers[1] = (Layer){.kind = DROPOUT, .in = shape, .out = shape};
    for (size_t i = 0; i < LENGTH(element_bytes); i++) {
        const Kernels kernels = {.element_bytes = element_bytes[i]};
        const double expected = (double)(images * outputs * (4 * element_bytes[i] + 2));
        net.kernels = &kernels;
        if (row_bytes(&net, 1, images) != expected)
            fail("%zu bytes an element: expected %g bytes, found %g", element_bytes[i], expected,
                 row_bytes(&net, 1, images));
    }
    verdict("bytes of a dropout");
}

// What the last epoch's end took, which its marks give only now, is not of the first step.
static void test_start_of_epoch(void) {
    static Run run;
    StepResult steps[2] = {0}, zero = {0};
    run.kernels = &naive_kernels;
    run.device = run.clock.device = &cpu_device;
    run.settings = (Settings){.lr = .1, .schedule = SCHEDULE_COSINE, .epochs = 2, .trace = ""};
    run.comm = (Communicator){.dp = true, .rank = 1}; // without a loader
    run.recorder.steps = steps;
    run.recorder.steps_capacity = 2;
    run.epoch_steps = run.epoch = 1;
    steps[1].phases[PHASE_LOAD] = 1;
    clock_line(&run.clock, 1, &steps[0].phases[PHASE_OTHER], "the end of an epoch");
    clock_stop(&run.clock);
    start_epoch(&run);
    for (size_t i = 0; i < 2; i++)
        if (memcmp(&steps[i], &zero, sizeof zero) != 0)
            fail("step %zu begins with times of the epoch before", i);
    verdict("steps of an epoch begin with no time");
}

static void test_instruments(void) {
    test_layer_times("cifar", "synthetic", 6);
    test_layer_times("resnet8", "synthetic", 21);
    test_bytes_of_masks();
    test_start_of_epoch();
}
