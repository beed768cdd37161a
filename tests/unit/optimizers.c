/* optimizers.c - section 7 of cnn.c: the same bits for any number of threads, and nothing written
   beside the arrays. golden.c compares optimizers and schedules with PyTorch. */

enum { FLAT_COUNT = 1003, FLAT_KINDS = 4 };
static const char *const flat_names[FLAT_KINDS] = {"adadelta", "sgd", "dropout's gradient",
                                                   "dropout's gradient, accumulate"};

// An operation that goes over a flat range of numbers, by so many threads. Returns what it made.
static Array run_flat(size_t kind, int threads) {
    Layer l = {.kind = DROPOUT, .p = (real).4, .in = {1, 1, FLAT_COUNT}, .out = {1, 1, FLAT_COUNT}};
    uint8_t mask[FLAT_COUNT];
    drawn = 0; // the same numbers each time
    Array made = array(FLAT_COUNT, guard_value), in = random_array(FLAT_COUNT);
    Array square = array(FLAT_COUNT, guard_value), other = array(FLAT_COUNT, guard_value);
    for (size_t i = 0; i < FLAT_COUNT; i++) {
        made.at[i] = draw_real();
        square.at[i] = other.at[i] = (real)fabs((double)in.at[i]);
        mask[i] = draw_bits() % 2;
    }
    set_num_threads(threads);
    const Update u = {.param = made.at,
                      .state = {square.at, other.at},
                      .grad = in.at,
                      .count = FLAT_COUNT,
                      .step = &(StepInputs){.lr = kind ? .1 : .7},
                      .momentum = .9,
                      .weight_decay = .1,
                      .nesterov = true};
    const Work w = {
        .l = &l, .n = 1, .dout = in.at, .din = made.at, .saved = mask, .accumulate = kind == 3};
    if (kind == 0)
        adadelta_naive(u);
    else if (kind == 1)
        sgd_naive(u);
    else
        dropout_backward(w);
    set_num_threads(2);
    check_guards("param or din", &made);
    check_guards("square_avg or momentum_buffer", &square);
    check_guards("acc_delta", &other);
    free_arrays((Array[]){in, square, other}, 3 * sizeof(Array));
    return made;
}

static void test_flat_ranges(size_t kind) {
    char name[96];
    Array one = run_flat(kind, 1);
    for (int threads = 2; threads < 9; threads++) {
        Array more = run_flat(kind, threads);
        check_tensor("1 thread against more", more.at, one.at, NULL, FLAT_COUNT);
        free(more.base);
    }
    free(one.base);
    snprintf(name, sizeof name, "%s: the same bits for any number of threads", flat_names[kind]);
    verdict("%s", name);
}

static void test_optimizers(void) {
    for (size_t kind = 0; kind < FLAT_KINDS; kind++)
        test_flat_ranges(kind);
}
