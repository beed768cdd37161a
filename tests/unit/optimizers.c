/* optimizers.c - section 7 of cnn.c: each optimizer against a plain loop in double, and the
   same bits for any number of threads. golden.c compares optimizers and schedules with PyTorch. */

enum { OPT_COUNT = 1003, OPT_STEPS = 10 };
typedef struct Rule {
    const char *name;
    bool adadelta, nesterov;
    double momentum, decay;
} Rule;

typedef struct Reference {
    double param, square, delta, buffer, moved; // moved: the sum of |steps|, for the bound
} Reference;

static double adadelta_delta(Reference *r, double g) {
    r->square = .9 * r->square + .1 * g * g;
    double delta = sqrt(r->delta + 1e-6) / sqrt(r->square + 1e-6) * g;
    r->delta = .9 * r->delta + .1 * delta * delta;
    return .7 * delta;
}

static double sgd_delta(Reference *r, double g, const Rule *rule) {
    r->buffer = rule->momentum * r->buffer + g;
    return .01 * (rule->nesterov ? g + rule->momentum * r->buffer : r->buffer);
}

static void reference_step(Reference *r, double g, const Rule *rule) {
    g += rule->decay * r->param;
    double step = rule->adadelta ? adadelta_delta(r, g) : sgd_delta(r, g, rule);
    r->param -= step;
    r->moved += fabs(step);
}

static void test_optimizer(const Rule *rule) {
    static Reference r[OPT_COUNT];
    Array param = array(OPT_COUNT, guard_value);
    Array want = array(OPT_COUNT, 0), bound = array(OPT_COUNT, 0);
    Array state = array(OPT_COUNT, guard_value), delta = array(OPT_COUNT, guard_value);
    for (size_t i = 0; i < OPT_COUNT; i++) {
        param.at[i] = draw_real();
        r[i] = (Reference){.param = (double)param.at[i]};
        state.at[i] = delta.at[i] = 0;
    }
    for (int step = 0; step < OPT_STEPS; step++) {
        Array grad = random_array(OPT_COUNT);
        for (size_t i = 0; i < OPT_COUNT; i++)
            reference_step(&r[i], (double)grad.at[i], rule);
        if (rule->adadelta)
            adadelta_naive((Update){.param = param.at,
                                    .state = {state.at, delta.at},
                                    .grad = grad.at,
                                    .count = OPT_COUNT,
                                    .step = &(StepInputs){.lr = .7},
                                    .weight_decay = rule->decay});
        else // without momentum there is no buffer
            sgd_naive((Update){.param = param.at,
                               .state = {rule->momentum > 0 ? state.at : NULL},
                               .grad = grad.at,
                               .count = OPT_COUNT,
                               .step = &(StepInputs){.lr = .01},
                               .momentum = rule->momentum,
                               .weight_decay = rule->decay,
                               .nesterov = rule->nesterov});
        free(grad.base);
    }
    for (size_t i = 0; i < OPT_COUNT; i++) { // each step rounds a few times
        want.at[i] = (real)r[i].param;
        bound.at[i] = (real)(2 * OPT_STEPS * epsilon * (fabs(r[i].param) + 4 * r[i].moved));
    }
    check_tensor("param", param.at, want.at, bound.at, OPT_COUNT);
    check_guards("param", &param);
    check_guards("square_avg or momentum_buffer", &state);
    check_guards("acc_delta", &delta);
    free_arrays((Array[]){param, want, bound, state, delta}, 5 * sizeof(Array));
    verdict("%s", rule->name);
}

enum { FLAT_COUNT = 1003, FLAT_KINDS = 4 };
static const char *const flat_names[FLAT_KINDS] = {"adadelta", "sgd", "dropout's gradient",
                                                   "dropout's gradient, accumulate"};

// An operation that goes over a flat range of numbers, by so many threads. Returns what it made.
static Array run_flat(size_t kind, int threads) {
    Layer l = {.kind = DROPOUT, .p = (real).4, .in = {1, 1, FLAT_COUNT}, .out = {1, 1, FLAT_COUNT}};
    uint8_t mask[FLAT_COUNT];
    drawn = 0; // the same numbers each time
    Array made = random_array(FLAT_COUNT), in = random_array(FLAT_COUNT);
    Array square = absolute(&in), other = absolute(&in);
    for (size_t i = 0; i < FLAT_COUNT; i++)
        mask[i] = draw_bits() % 2;
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
    static const Rule rules[] = {
        {"adadelta against a plain loop", true, false, 0, 0},
        {"adadelta with weight decay against a plain loop", true, false, 0, .1},
        {"sgd against a plain loop", false, false, 0, 0},
        {"sgd with momentum against a plain loop", false, false, .9, 0},
        {"sgd with momentum and weight decay against a plain loop", false, false, .8, .1},
        {"sgd with Nesterov's momentum against a plain loop", false, true, .9, .1},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        test_optimizer(&rules[i]);
    for (size_t kind = 0; kind < FLAT_KINDS; kind++)
        test_flat_ranges(kind);
}
