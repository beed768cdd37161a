/* lab01.c - the tests of lab 1: `lab01 3` runs test 3. SEED=n repeats a run.

   It is built from sections 1 to 5 of cnn.c with the student's parts, without the fast kernels, in
   double precision; they run in a process of their own (apart.h). There is no convolution in here
   to compare with. Two of the three tensors of a layer are zero except for one number each. Their
   product belongs to one element of the third tensor, or to none. Where it is found instead shows
   which mistake was made: contributes() says to which elements it belongs, in a correct program and
   with each of the usual mistakes. */

#include "layers.c"

#include "models.c"

#include "apart.h"
#include "report.h"

#define printf(...) fprintf(verdict(), __VA_ARGS__) // from here on

// ---- Random numbers

static uint64_t seed;

static uint32_t draw_bits(void) {
    static uint32_t drawn;
    uint32_t r[4];
    philox4x32(r, drawn++, 0, 0, 1, seed);
    return r[0];
}

static size_t draw_size(size_t least, size_t most) {
    return least + draw_bits() % (most - least + 1);
}

// Never 0, and no two alike: in [1, 2).
static real draw_real(void) {
    return 1 + uniform(draw_bits());
}

// As draw_real(), of either sign.
static real draw_signed(void) {
    return draw_bits() % 2 ? draw_real() : -draw_real();
}

// ---- Arrays between guard zones, which must not be written and should not be read

enum { GUARD = 4096, MOST = 16384 };

typedef struct Array {
    size_t count;
    real *data, memory[GUARD + MOST + GUARD];
} Array;

static size_t with_guards(const Array *a) {
    return GUARD + a->count + GUARD;
}

static void fill(Array *a, real value) {
    for (size_t i = 0; i < a->count; i++)
        a->data[i] = value;
}

static void fill_random(Array *a) {
    for (size_t i = 0; i < a->count; i++)
        a->data[i] = draw_signed();
}

// Fills the guard zones with `around` and the array, `count` numbers, with 0.
static void resize(Array *a, size_t count, real around) {
    a->data = a->memory + GUARD;
    a->count = count;
    for (size_t i = 0; i < with_guards(a); i++)
        a->memory[i] = around;
    fill(a, 0);
}

// The first index outside of the array that has been written; 0: none.
static ptrdiff_t written_outside(const Array *a, real around) {
    for (ptrdiff_t i = -GUARD; i < (ptrdiff_t)(a->count + GUARD); i++) {
        real value = a->data[i];
        bool inside = i >= 0 && i < (ptrdiff_t)a->count;
        if (!inside && memcmp(&value, &around, sizeof value) != 0)
            return i;
    }
    return 0;
}

// ---- A case: a layer of some shape, and the tensor that the function under test computes

typedef enum { OUTPUT, FILTER, IMAGE, ROLES } Role; // which tensor a function computes

typedef struct Case {
    Role role;
    bool pool;
    size_t step, n;
    Layer l;
    bool accumulate, biased;
} Case;

static const char *const steps[] = {"the smallest window, on one image of one channel",
                                    "larger windows, which may overlap",
                                    "padding",
                                    "a stride above 1",
                                    "several channels",
                                    "several images",
                                    "images of 1 x 1 pixel: a linear layer"};
enum { STEPS = sizeof steps / sizeof *steps };

/* The function computes tensors[c.role] from the other two. The backward of a convolution computes
   two tensors: the one that is not under test goes into a spare array. */
static Array tensors[ROLES], bias, prior, spare_filter, spare_image, spare_bias, scratch;
static uint8_t argmax_memory[GUARD + MOST + GUARD], *const argmax = argmax_memory + GUARD;
static Case now_testing; // for the report of a crash
static size_t threads = 1;

static size_t tensor_size(const Case *c, Role role) {
    return role == OUTPUT   ? c->n * shape_size(c->l.out)
           : role == FILTER ? c->l.kernel_size * c->l.kernel_size * c->l.in.c * c->l.out.c
                            : c->n * shape_size(c->l.in);
}

static void slide_window(Layer *l) {
    l->out.h = (l->in.h + 2 * l->padding - l->kernel_size) / l->stride + 1;
    l->out.w = (l->in.w + 2 * l->padding - l->kernel_size) / l->stride + 1;
}

static Case draw_case(Role role, bool pool, size_t step) {
    Case c = {.role = role, .pool = pool, .step = step, .n = 1};
    Layer *l = &c.l;
    size_t channels = step < 4 ? 1 : 5;
    l->kind = pool ? MAXPOOL2D : CONV2D;
    l->kernel_size = step == 6 || (step == 0 && !pool) ? 1 : draw_size(2, step == 0 ? 2 : 5);
    l->stride = !pool || step > 1 ? 1 : step == 0 ? l->kernel_size : draw_size(1, l->kernel_size);
    l->padding = step < 2 || step == 6 ? 0 : draw_size(step == 2, min_size(2, l->kernel_size - 1));
    if (step >= 3 && step < 6)
        l->stride = draw_size(2 - (step > 3), 3);
    l->in = (Shape){draw_size(5, 9), 0, draw_size(1, channels)};
    l->in.w = l->in.h + draw_size(1, 4);
    if (step == 6)
        l->in = (Shape){1, 1, draw_size(2, 12)};
    slide_window(l);
    l->out.c = pool ? l->in.c : draw_size(1, step == 6 ? 12 : channels);
    c.n = step < 5 ? 1 : draw_size(2, 3);
    c.accumulate = role == IMAGE && step > 0 && draw_size(0, 1);
    c.biased = !pool && draw_size(0, 1);
    l->weight_count = pool ? 0 : tensor_size(&c, FILTER);
    l->bias_count = c.biased ? l->out.c : 0;
    return c;
}

// Sets all arrays to 0 and their guard zones to `around`.
static void clear(const Case *c, real around) {
    for (Role role = 0; role < ROLES; role++)
        resize(&tensors[role], tensor_size(c, role), around);
    resize(&bias, c->l.out.c, around);
    resize(&prior, tensors[c->role].count, 0);
    resize(&spare_filter, tensors[FILTER].count, around);
    resize(&spare_image, tensors[IMAGE].count, around);
    resize(&spare_bias, c->l.out.c, around);
    resize(&scratch, c->l.weight_count, around); // what scratch_size_naive() grants a convolution
    fill(&scratch, around);
}

// ---- Reports

static const char *name_of(const Case *c, Role role) {
    static const char *const names[ROLES][ROLES] = {
        {"out", "weight", "in"}, {"dout", "dweight", "in"}, {"dout", "weight", "din"}};
    return names[c->role][role];
}

// "in[0][4][8][2]"; four results are valid at a time
static const char *element(const Case *c, Role role, size_t at) {
    static char texts[4][96];
    static size_t next;
    const Layer *l = &c->l;
    Shape s = role == OUTPUT   ? l->out
              : role == FILTER ? (Shape){l->kernel_size, l->in.c, l->out.c}
                               : l->in;
    char *text = texts[next++ % 4];
    snprintf(text, sizeof texts[0], "%s[%zu][%zu][%zu][%zu]", name_of(c, role),
             at / (s.h * s.w * s.c), at / (s.w * s.c) % (role == FILTER ? l->kernel_size : s.h),
             at / s.c % s.w, at % s.c);
    if (role == FILTER)
        snprintf(text, sizeof texts[0], "%s[%zu][%zu][%zu][%zu]", name_of(c, role),
                 at / (l->kernel_size * l->in.c * l->out.c),
                 at / (l->in.c * l->out.c) % l->kernel_size, at / l->out.c % l->in.c,
                 at % l->out.c);
    return text;
}

static void print_case(const Case *c) {
    const Layer *l = &c->l;
    printf("%s %zux%zu, stride %zu, padding %zu; %zu image%s of %zu x %zu pixels and %zu channel%s "
           "-> %zu x %zu and %zu",
           c->pool ? "max-pool" : "convolution", l->kernel_size, l->kernel_size, l->stride,
           l->padding, c->n, c->n == 1 ? "" : "s", l->in.h, l->in.w, l->in.c,
           l->in.c == 1 ? "" : "s", l->out.h, l->out.w, l->out.c);
    printf("%s%s\n",
           c->pool     ? ""
           : c->biased ? "; with a bias"
                       : "; no bias (NULL)",
           c->accumulate ? "; accumulate" : "");
}

static void print_step(const Case *c) {
    printf("New in this step: %s%s.%s\n", steps[c->step], c->accumulate ? "; accumulate" : "",
           c->step > 0 ? " The steps before it passed." : "");
}

static int test; // the number of the test that runs

static void print_how_to_repeat(void) {
    const char *other = getenv("LAB_AND_TEST"); // lab 2 uses test 1
    printf("To repeat this test with the same numbers: SEED=%llu make check ",
           (unsigned long long)seed);
    if (other)
        printf("%s\n", other);
    else
        printf("LAB=1 TEST=%d\n", test);
}

static _Noreturn void give_up(void) {
    print_how_to_repeat();
    exit(1);
}

static void check_guard(const Case *c, const Array *a, const char *name, real around) {
    ptrdiff_t at = written_outside(a, around);
    if (at == 0)
        return;
    printf("%s has %zu numbers, but index %td was written.\n", name, a->count, at);
    print_case(c);
    give_up();
}

static void check_guards(const Case *c, real around) {
    for (Role role = 0; role < ROLES; role++)
        check_guard(c, &tensors[role], name_of(c, role), around);
    check_guard(c, &scratch, "scratch", around);
}

// ---- The student's functions, which the worker calls

typedef enum { CONV_FORWARD, CONV_BACKWARD, POOL_FORWARD, POOL_BACKWARD, SOFTMAX, LENET } Function;

enum { MOST_LOANS = 8 };

// What both programs have: the call, and copies of its arrays
typedef struct Shared {
    Apart apart;
    Function function;
    Work work;
    Layer layer; // of work
    size_t threads;
    real arrays[MOST_LOANS][GUARD + MOST + GUARD];
    uint8_t argmax[GUARD + MOST + GUARD];
    Shape images; // of lenet
    size_t classes;
    Net net;
} Shared;

static Shared *const shared = SHARED_MEMORY;

// The arrays of the next call; an input must not be changed.
static struct {
    Array *array;
    const char *name;
    bool is_input;
} loans[MOST_LOANS];
static size_t loan_count;

// Copies an array with its guard zones to the worker, which has it there.
static real *lend(Array *a, const char *name, bool is_input) {
    real *copy = shared->arrays[loan_count];
    memcpy(copy, a->memory, with_guards(a) * sizeof(real));
    loans[loan_count].array = a;
    loans[loan_count].name = name;
    loans[loan_count].is_input = is_input;
    loan_count++;
    return copy + GUARD;
}

static real *lend_input(Array *a, const char *name) {
    return lend(a, name, true);
}

static real *lend_output(Array *a, const char *name) {
    return lend(a, name, false);
}

static uint8_t *lend_argmax(void) {
    memcpy(shared->argmax, argmax_memory, sizeof argmax_memory);
    return shared->argmax + GUARD;
}

static _Noreturn void report_changed(const char *name) {
    printf("%s is an input, but it was changed.\n", name);
    print_case(&now_testing);
    give_up();
}

static void take_back(Function function) {
    for (size_t i = 0; i < loan_count; i++) {
        Array *a = loans[i].array;
        const real *copy = shared->arrays[i];
        if (loans[i].is_input && memcmp(copy + GUARD, a->data, a->count * sizeof(real)) != 0)
            report_changed(loans[i].name);
        memcpy(a->memory, copy, with_guards(a) * sizeof(real));
    }
    loan_count = 0;
    if (function == POOL_FORWARD)
        memcpy(argmax_memory, shared->argmax, sizeof argmax_memory);
    if (function == POOL_BACKWARD &&
        memcmp(argmax_memory, shared->argmax, sizeof argmax_memory) != 0)
        report_changed("argmax (w.saved)");
}

static _Noreturn void report_end(Function function, const char *end) {
    const bool convolution = function == CONV_FORWARD || function == CONV_BACKWARD;
    const bool no_bias = (size_t)shared->apart.fault < 65536 && !now_testing.biased && convolution;
    printf("Your code %s%s\n", end, no_bias ? " (w.bias, if the layer has no bias)" : "");
    if (function != LENET && function != SOFTMAX)
        print_case(&now_testing);
    give_up();
}

static void run_part(Function function, Work w) {
    shared->function = function;
    shared->threads = threads;
    shared->work = w;
    if (w.l)
        shared->layer = *w.l;
    shared->work.l = &shared->layer;
    const char *end = run_apart();
    if (end)
        report_end(function, end);
    take_back(function);
}

// In the worker
static void build_lenet(void) {
    static const Kernels none;
    static Settings settings = {.model = "lenet", .width = 6};
    DatasetInfo info = {.name = "the test", .shape = shared->images, .classes = shared->classes};
    net_build(&shared->net, find_model("lenet"), &info, &settings, &none);
}

// In the worker
static void call_part(void) {
    const Work w = shared->work;
    set_num_threads(shared->threads);
    switch (shared->function) {
    case CONV_FORWARD:
        conv2d_forward_naive(w);
        break;
    case CONV_BACKWARD:
        conv2d_backward_naive(w);
        break;
    case POOL_FORWARD:
        maxpool2d_forward_naive(w);
        break;
    case POOL_BACKWARD:
        maxpool2d_backward(w);
        break;
    case SOFTMAX:
        log_softmax_backward(w);
        break;
    case LENET:
        build_lenet();
    }
}

// Calls the student's function. The result holds `before`, or the prior if accumulate, which is
// about din: gradients of weights are always =.
static void call(const Case *c, real before) {
    Array *out = &tensors[OUTPUT], *filter = &tensors[FILTER], *image = &tensors[IMAGE];
    Array *result = &tensors[c->role];
    now_testing = *c;
    fill(result, before);
    if (c->accumulate)
        memcpy(result->data, prior.data, prior.count * sizeof(real));
    Work w = {.l = &c->l, .n = c->n, .accumulate = c->accumulate || c->role == FILTER};
    w.scratch = lend_output(&scratch, "scratch");
    if (c->role == OUTPUT) {
        w.in = lend_input(image, "in");
        w.weight = lend_input(filter, "weight");
        w.bias = c->biased ? lend_input(&bias, "bias") : NULL;
        w.out = lend_output(out, "out");
        run_part(CONV_FORWARD, w);
        return;
    }
    w.bias = c->biased ? lend_input(&bias, "bias") : NULL;
    w.dout = lend_input(out, "dout");
    w.din = c->role == IMAGE ? lend_output(image, "din") : NULL;
    if (c->pool) {
        w.saved = lend_argmax();
        run_part(POOL_BACKWARD, w);
        return;
    }
    const bool weights = c->role == FILTER; // whose gradient is under test
    w.in = lend_input(weights ? image : &spare_image, "in");
    w.weight = lend_input(weights ? &spare_filter : filter, "weight");
    w.dweight = lend_output(weights ? filter : &spare_filter, "dweight");
    w.dbias = lend_output(weights ? &bias : &spare_bias, "dbias");
    run_part(CONV_BACKWARD, w);
}

// ---- Which pixel and weight belong to which output, in a correct program and with usual mistakes

typedef enum {
    RIGHT,
    NO_STRIDE,
    STRIDE_OF_KERNEL,
    NO_PADDING,
    PADDING_ADDED,
    BORDER_COLUMNS,
    BORDER_ROWS,
    BORDER,
    ROTATED,
    TRANSPOSED,
    ROWS_OF_HEIGHT,
    WEIGHTS_C_FIRST,
    WEIGHTS_K_FIRST,
    WEIGHTS_TORCH,
    WEIGHTS_K_C,
    IMAGES_IN_PLANES,
    OUTPUTS_IN_PLANES,
    PIXELS_OF_IMAGE_0,
    ONLY_IMAGE_0,
    ONLY_LAST_IMAGE,
    ONLY_LAST_PIXEL,
    ONLY_LAST_PRODUCT,
    ONLY_CHANNEL_0,
    ONLY_FIRST_TAP,
    MISTAKES
} Mistake;

static const char *const effects[MISTAKES] = {
    [NO_STRIDE] = "the stride was forgotten: the window moves by one pixel",
    [STRIDE_OF_KERNEL] = "the window moves by its own size; it has to move by the stride",
    [NO_PADDING] = "the padding was forgotten: the window of output (0, 0) begins at pixel (0, 0), "
                   "not padding pixels above and left of it",
    [PADDING_ADDED] = "the padding was added where it has to be subtracted",
    [BORDER_COLUMNS] =
        "pixels outside of the image were read: a border must count as 0. In memory, "
        "after the last pixel of a row comes the first one of the next row",
    [BORDER_ROWS] = "pixels outside of the image were read: a border must count as 0. In memory, "
                    "before an image's first row comes the last row of the previous image",
    [BORDER] = "pixels outside of the image were read: a border must count as 0. In memory, after "
               "the last pixel of a row comes the first one of the next row",
    [ROTATED] = "the filter was rotated by 180 degrees: weight[0][0] belongs to the window's upper "
                "left pixel",
    [TRANSPOSED] = "rows and columns of the filter were swapped",
    [ROWS_OF_HEIGHT] = "a row of the image was taken to be as long as the image is high",
    [WEIGHTS_C_FIRST] = "the weights were indexed [c][i][j][k]; they are stored [i][j][c][k]",
    [WEIGHTS_K_FIRST] = "the weights were indexed [k][i][j][c]; they are stored [i][j][c][k]",
    [WEIGHTS_TORCH] = "the weights were indexed [k][c][i][j]; they are stored [i][j][c][k]",
    [WEIGHTS_K_C] = "the weights were indexed [i][j][k][c]; they are stored [i][j][c][k]",
    [IMAGES_IN_PLANES] = "the input was indexed [n][c][h][w]; it is stored [n][h][w][c]",
    [OUTPUTS_IN_PLANES] = "the output was indexed [n][k][h][w]; it is stored [n][h][w][k]",
    [PIXELS_OF_IMAGE_0] = "only image 0 of the input is used, for all outputs",
    [ONLY_IMAGE_0] = "only image 0 is right; the other images are ignored",
    [ONLY_LAST_IMAGE] = "only the last image counts: the sums of earlier images are overwritten",
    [ONLY_LAST_PIXEL] = "only the last output pixel counts: = where += is needed",
    [ONLY_LAST_PRODUCT] = "only the last product of each sum is left: = where += is needed",
    [ONLY_CHANNEL_0] = "only channel 0 of the input is right; the other channels are ignored",
    [ONLY_FIRST_TAP] = "only the window's upper left pixel counts",
};

typedef struct Place {
    size_t n, y, x, c;
} Place;

static Place place(size_t at, Shape s, bool planes) {
    if (planes)
        return (Place){at / shape_size(s), at / s.w % s.h, at % s.w, at / (s.h * s.w) % s.c};
    return (Place){at / shape_size(s), at / (s.w * s.c) % s.h, at / s.c % s.w, at % s.c};
}

typedef struct Weight {
    size_t i, j, c, k;
} Weight;

static Weight weight_at(size_t at, const Layer *l, Mistake m) {
    size_t K = l->kernel_size, C = l->in.c, O = l->out.c;
    switch (m) {
    case WEIGHTS_C_FIRST:
        return (Weight){at / (O * K) % K, at / O % K, at / (O * K * K), at % O};
    case WEIGHTS_K_FIRST:
        return (Weight){at / (C * K) % K, at / C % K, at % C, at / (C * K * K)};
    case WEIGHTS_TORCH:
        return (Weight){at / K % K, at % K, at / (K * K) % C, at / (K * K * C)};
    case WEIGHTS_K_C:
        return (Weight){at / (O * C * K), at / (O * C) % K, at % C, at / C % O};
    case ROTATED:
        return (Weight){K - 1 - at / (O * C * K), K - 1 - at / (O * C) % K, at / O % C, at % O};
    case TRANSPOSED:
        return (Weight){at / (O * C) % K, at / (O * C * K), at / O % C, at % O};
    default:
        return (Weight){at / (O * C * K), at / (O * C) % K, at / O % C, at % O};
    }
}

static bool left_out(const Case *c, Place o, Weight w, Mistake m) {
    const Layer *l = &c->l;
    bool last_pixel = o.n == c->n - 1 && o.y == l->out.h - 1 && o.x == l->out.w - 1;
    bool last_product =
        w.i == l->kernel_size - 1 && w.j == l->kernel_size - 1 && w.c == l->in.c - 1;
    return (m == ONLY_IMAGE_0 && o.n > 0) || (m == ONLY_LAST_IMAGE && o.n < c->n - 1) ||
           (m == ONLY_LAST_PIXEL && !last_pixel) || (m == ONLY_LAST_PRODUCT && !last_product) ||
           (m == ONLY_CHANNEL_0 && w.c > 0) || (m == ONLY_FIRST_TAP && w.i + w.j > 0);
}

// Whether output number at[OUTPUT] contains weight number at[FILTER] times pixel number at[IMAGE].
static bool contributes(const Case *c, const size_t at[ROLES], Mistake m) {
    const Layer *l = &c->l;
    Place o = place(at[OUTPUT], l->out, m == OUTPUTS_IN_PLANES);
    Place p = place(at[IMAGE], l->in, m == IMAGES_IN_PLANES);
    Weight w = weight_at(at[FILTER], l, m);
    ptrdiff_t stride = (ptrdiff_t)l->stride, padding = (ptrdiff_t)l->padding;
    stride = m == NO_STRIDE ? 1 : m == STRIDE_OF_KERNEL ? (ptrdiff_t)l->kernel_size : stride;
    padding = m == NO_PADDING ? 0 : m == PADDING_ADDED ? -padding : padding;
    ptrdiff_t y = (ptrdiff_t)o.y * stride + (ptrdiff_t)w.i - padding;
    ptrdiff_t x = (ptrdiff_t)o.x * stride + (ptrdiff_t)w.j - padding;
    bool rows_may_leave = m == BORDER_ROWS || m == BORDER || m == ROWS_OF_HEIGHT;
    bool columns_may_leave = m == BORDER_COLUMNS || m == BORDER;
    if (o.c != w.k || p.c != w.c || left_out(c, o, w, m) ||
        (!rows_may_leave && (y < 0 || y >= (ptrdiff_t)l->in.h)) ||
        (!columns_may_leave && (x < 0 || x >= (ptrdiff_t)l->in.w)))
        return false;
    ptrdiff_t pixels = (ptrdiff_t)(l->in.h * l->in.w), row = (ptrdiff_t)l->in.w;
    ptrdiff_t read = (ptrdiff_t)(m == PIXELS_OF_IMAGE_0 ? 0 : o.n) * pixels +
                     y * (m == ROWS_OF_HEIGHT ? (ptrdiff_t)l->in.h : row) + x;
    return read == (ptrdiff_t)p.n * pixels + (ptrdiff_t)p.y * row + (ptrdiff_t)p.x;
}

// ---- One number in each of two tensors

typedef struct Trial {
    size_t at[ROLES]; // of c->role: nothing
    real value[ROLES];
} Trial;

/* An output, a weight, and the pixel that belongs to both, or would without the border. For a
   pool, the weight stands for the position of the maximum; it has the output's channels. */
static Trial draw_trial(const Case *c) {
    const Layer *l = &c->l;
    Trial t;
    for (;;) {
        for (Role role = 0; role < ROLES; role++) {
            t.at[role] = draw_size(0, tensors[role].count - 1);
            t.value[role] = draw_signed();
        }
        Place o = place(t.at[OUTPUT], l->out, false);
        if (c->pool) {
            size_t tap = draw_size(0, l->kernel_size * l->kernel_size - 1);
            t.at[FILTER] = (tap * l->in.c + o.c) * l->out.c + o.c;
            t.value[FILTER] = 1;
        }
        Weight w = weight_at(t.at[FILTER], l, RIGHT);
        t.at[OUTPUT] += w.k - o.c;
        size_t row = o.n * l->in.h + o.y * l->stride + w.i - l->padding;
        size_t read = (row * l->in.w + o.x * l->stride + w.j - l->padding) * l->in.c + w.c;
        t.at[IMAGE] = read < tensors[IMAGE].count ? read : t.at[IMAGE];
        if (!c->pool || contributes(c, t.at, RIGHT))
            return t;
    }
}

// Random positions of the maxima, inside of the image; the trial's output has the trial's.
static void draw_argmax(const Case *c, const Trial *t) {
    const Layer *l = &c->l;
    memset(argmax_memory, 255, sizeof argmax_memory);
    for (size_t i = 0; i < tensors[OUTPUT].count; i++) {
        Place o = place(i, l->out, false);
        size_t y, x, tap;
        do {
            tap = draw_size(0, l->kernel_size * l->kernel_size - 1);
            y = o.y * l->stride + tap / l->kernel_size - l->padding;
            x = o.x * l->stride + tap % l->kernel_size - l->padding;
        } while (y >= l->in.h || x >= l->in.w);
        argmax[i] = (uint8_t)tap;
    }
    if (t)
        argmax[t->at[OUTPUT]] = (uint8_t)(t->at[FILTER] / (l->in.c * l->out.c));
}

static void run_trial(const Case *c, const Trial *t, real before, real around) {
    clear(c, around);
    for (Role role = 0; role < ROLES; role++)
        if (role != c->role)
            tensors[role].data[t->at[role]] = t->value[role];
    if (c->pool)
        draw_argmax(c, t);
    if (c->accumulate)
        fill_random(&prior);
    call(c, before);
}

static real product(const Case *c, const Trial *t) {
    real both = 1;
    for (Role role = 0; role < ROLES; role++)
        both *= role == c->role ? 1 : t->value[role];
    return both;
}

// Whether the product belongs to element i of the result.
static bool contributes_at(const Case *c, const Trial *t, Mistake m, size_t i) {
    Trial moved = *t;
    moved.at[c->role] = i;
    return contributes(c, moved.at, m);
}

static real wanted(const Case *c, const Trial *t, Mistake m, size_t i) {
    return prior.data[i] + (contributes_at(c, t, m, i) ? product(c, t) : 0);
}

static bool close_to(real a, real b) {
    return fabs(a - b) <= 1e-11 * (1 + fabs(b));
}

// The first element that this mistake does not explain; the count, if it explains all.
static size_t first_wrong(const Case *c, const Trial *t, Mistake m) {
    size_t i = 0;
    while (i < tensors[c->role].count && close_to(tensors[c->role].data[i], wanted(c, t, m, i)))
        i++;
    return i;
}

static bool explained_by(const Case *c, const Trial *t, Mistake m, real before, real around) {
    run_trial(c, t, before, around);
    return first_wrong(c, t, m) == tensors[c->role].count;
}

// Whether this mistake explains the results of many trials.
static bool always_explained_by(const Case *c, const Trial *first, Mistake m) {
    bool all = explained_by(c, first, m, 0, 0);
    for (size_t i = 0; i < 60 && all; i++) {
        Trial t = draw_trial(c);
        all = explained_by(c, &t, m, 0, 0);
    }
    return all;
}

// Whether each element is its old value plus the right one.
static bool added_to_before(const Case *c, const Trial *t) {
    size_t i = 0, count = tensors[c->role].count;
    run_trial(c, t, 1, NAN);
    while (i < count && close_to(tensors[c->role].data[i], 1 + wanted(c, t, RIGHT, i)))
        i++;
    return i == count;
}

// Where the product is found instead; the count, if nowhere.
static size_t find_product(const Case *c, const Trial *t) {
    size_t i = 0, count = tensors[c->role].count;
    run_trial(c, t, 0, 0);
    while (i < count && (contributes_at(c, t, RIGHT, i) ||
                         !close_to(tensors[c->role].data[i] - prior.data[i], product(c, t))))
        i++;
    return i;
}

// Whether element i is where the product belongs, moved by the padding in rows and columns
static bool moved_by_padding(const Case *c, const Trial *t, size_t i) {
    const Layer *l = &c->l;
    const size_t width = c->role == OUTPUT ? l->out.w : c->role == IMAGE ? l->in.w : l->kernel_size;
    const size_t numbers = c->role == OUTPUT  ? l->out.c
                           : c->role == IMAGE ? l->in.c
                                              : l->in.c * l->out.c;
    const size_t step = l->padding * (width + 1) * numbers, count = tensors[c->role].count;
    return step > 0 && ((i + step < count && contributes_at(c, t, RIGHT, i + step)) ||
                        (i >= step && contributes_at(c, t, RIGHT, i - step)));
}

// Whether the function leaves its result as it was.
static bool writes_nothing(const Case *c, const Trial *t) {
    size_t i = 0, count = tensors[c->role].count;
    Case fresh = *c;
    fresh.accumulate = false;
    run_trial(&fresh, t, 7, NAN);
    while (i < count && tensors[c->role].data[i] == 7)
        i++;
    return i == count;
}

// Prints what the two numbers by themselves show; false: nothing.
static bool print_ratio(const Case *c, real found, real expected) {
    const real n = (real)c->n, pixels = (real)(c->l.out.h * c->l.out.w);
    if (fabs(found - expected) <= 1e-5 * fabs(expected)) {
        printf("It has about 7 digits, as many as a float: declare sums and other numbers as "
               "`real`, which "
               "is double in this test.\n");
        return true;
    }
    const bool by_n = c->n > 1 && close_to(found * n, expected);
    if (by_n || (c->n * c->l.out.h * c->l.out.w > 1 && close_to(found * n * pixels, expected))) {
        printf("It was divided by the number of %s. The loss is a mean already, so a gradient is "
               "a sum of its products: divide by nothing.\n",
               by_n ? "images" : "images and pixels");
        return true;
    }
    return false;
}

static void print_effect(const Case *c, const Trial *t, real found, bool belongs_here) {
    if (writes_nothing(c, t)) {
        printf("All of %s is as it was before the call: is this part still empty?\n",
               name_of(c, c->role));
        return;
    }
    Case fresh = *c;
    fresh.accumulate = false;
    if (c->accumulate && explained_by(&fresh, t, RIGHT, 0, 0)) {
        printf("It is right without accumulate; with accumulate, add to din (+=).\n");
        return;
    }
    if (!c->accumulate && added_to_before(c, t)) {
        printf("It was added to the old value, here NaN: %s\n",
               c->role == IMAGE ? "without accumulate, set din to 0 first, then add to it."
               : c->role == FILTER
                   ? "= is needed, not +=, whatever w.accumulate says: that is about din."
                   : "set it first, to the bias or to 0; then add to it.");
        return;
    }
    if (always_explained_by(c, t, RIGHT)) {
        printf("%s\n", isnan(found)
                           ? "Numbers outside of an array were read, or this element was "
                             "never written. Pixels outside of the image count as 0."
                           : "A second call with the same input was right: is a variable used "
                             "before it is set?");
        return;
    }
    for (Mistake m = RIGHT + 1; m < MISTAKES; m++)
        if (always_explained_by(c, t, m)) {
            printf("All numbers look as if %s.\n", effects[m]);
            return;
        }
    size_t instead = find_product(c, t);
    if (instead < tensors[c->role].count)
        printf(
            "%s was found in %s.%s\n", c->pool ? "This dout" : "The product",
            element(c, c->role, instead),
            c->pool
                ? " w.saved is i * kernel_size + j of the maximum, counted from the window's upper "
                  "left corner: its pixel is (y * stride + i - padding, x * stride + j - padding)."
            : moved_by_padding(c, t, instead) ? " That is off by the padding: was it forgotten?"
            : belongs_here                    ? ""
                                              : " Is a sum not reset to 0 before the next one?");
    else if (isnan(found))
        printf("It was NaN before the call: it was never written, or numbers outside of an array "
               "were read.\n");
    else
        printf(
            "The product is in no other element: was it overwritten later (= where += is needed), "
            "left out, or counted twice? Or was an index computed with the sizes of the wrong "
            "tensor?\n");
}

static _Noreturn void report_trial(const Case *c, const Trial *t, size_t i) {
    Role first = c->role == OUTPUT ? IMAGE : OUTPUT, second = c->role == FILTER ? IMAGE : FILTER;
    real found = tensors[c->role].data[i], expected = wanted(c, t, RIGHT, i);
    printf("%s is %.6g, expected %.6g", element(c, c->role, i), found, expected);
    if (c->accumulate)
        printf(", of which %.6g is the old value", prior.data[i]);
    printf(".\n");
    if (c->pool)
        printf("All of dout is 0 except %s = %.6g, whose maximum was at position %zu of its window",
               element(c, OUTPUT, t->at[OUTPUT]), t->value[OUTPUT],
               t->at[FILTER] / (c->l.in.c * c->l.out.c));
    else
        printf("All of %s is 0 except %s = %.6g, all of %s except %s = %.6g", name_of(c, first),
               element(c, first, t->at[first]), t->value[first], name_of(c, second),
               element(c, second, t->at[second]), t->value[second]);
    size_t right = 0, count = tensors[c->role].count;
    while (right < count && !contributes_at(c, t, RIGHT, right))
        right++;
    const char *what = c->pool ? "this dout" : "their product";
    if (right < count)
        printf("; %s belongs to %s.\n", what, element(c, c->role, right));
    else
        printf("; %s belongs to no element of %s.\n", what, name_of(c, c->role));
    if (!print_ratio(c, found, expected))
        print_effect(c, t, found, right == i);
    print_case(c);
    print_step(c);
    give_up();
}

static void test_trials(const Case *c) {
    for (size_t i = 0; i < 24; i++) {
        clear(c, NAN);
        Trial t = draw_trial(c);
        run_trial(c, &t, NAN, NAN);
        check_guards(c, NAN);
        size_t at = first_wrong(c, &t, RIGHT);
        if (at < tensors[c->role].count)
            report_trial(c, &t, at);
    }
}

// ---- Many numbers at once

static void fill_all(const Case *c) {
    clear(c, NAN);
    for (Role role = 0; role < ROLES; role++)
        if (role != c->role)
            fill_random(&tensors[role]);
    if (c->role == OUTPUT)
        fill_random(&bias);
    if (c->pool)
        draw_argmax(c, NULL);
}

// f(a + b) = f(a) + f(b): each function is linear.
static void test_sums(Case c) {
    static real sum[MOST], whole[MOST];
    Array *result = &tensors[c.role], *split = &tensors[c.role == OUTPUT ? IMAGE : OUTPUT];
    c.accumulate = c.biased = false;
    c.l.bias_count = 0;
    fill_all(&c);
    memcpy(whole, split->data, split->count * sizeof(real));
    memset(sum, 0, sizeof sum);
    for (size_t part = 0; part < 3; part++) {
        for (size_t i = 0; i < split->count; i++)
            split->data[i] = part == 2 || i % 2 == part ? whole[i] : 0;
        call(&c, NAN);
        for (size_t i = 0; i < result->count; i++)
            sum[i] += part < 2 ? result->data[i] : -result->data[i];
    }
    for (size_t i = 0; i < result->count; i++)
        if (!(fabs(sum[i]) <= 1e-9)) {
            printf("%s: computed from the even elements of %s plus computed from the odd ones is "
                   "not what all of them give: %.6g too much.\n",
                   element(&c, c.role, i), name_of(&c, c.role == OUTPUT ? IMAGE : OUTPUT), sum[i]);
            printf("Single products were right. Is a partial sum overwritten?\n");
            print_case(&c);
            give_up();
        }
}

// Images large enough that threads run at the same time: a race is found by chance only.
static Case draw_large_case(Role role, bool pool) {
    Case c = draw_case(role, pool, 5);
    c.n = 3;
    c.accumulate = false;
    c.l.kernel_size = 5;
    c.l.stride = 1;
    c.l.padding = 2;
    c.l.in = (Shape){24, 29, 5};
    c.l.out.c = 5;
    slide_window(&c.l);
    c.l.weight_count = pool ? 0 : tensor_size(&c, FILTER);
    c.l.bias_count = c.biased ? c.l.out.c : 0;
    return c;
}

enum { THREADED_CALLS = 60 }; // in 10, one race of two was not found

static void test_threads(Case c) {
    static real one[MOST];
    Array *result = &tensors[c.role];
    fill_all(&c);
    call(&c, NAN);
    memcpy(one, result->data, result->count * sizeof(real));
    threads = 4;
    for (size_t repeat = 0; repeat < THREADED_CALLS; repeat++) {
        call(&c, NAN);
        for (size_t i = 0; i < result->count; i++)
            if (!close_to(result->data[i], one[i])) {
                printf("%s is %.6g with 4 threads and %.6g with one.\n", element(&c, c.role, i),
                       result->data[i], one[i]);
                printf("Two threads add to the same number at the same time (a race), or share a "
                       "variable of which each needs its own.\n");
                print_case(&c);
                give_up();
            }
    }
    threads = 1;
}

static void test_layer(Role role, bool pool) {
    for (size_t step = 0; step < (pool ? STEPS - 1 : STEPS); step++)
        for (size_t shape = 0; shape < 12; shape++) {
            Case c = draw_case(role, pool, step);
            test_trials(&c);
        }
    for (size_t shape = 0; shape < 12; shape++) {
        Case c = draw_case(role, pool, 5);
        test_sums(c);
    }
    for (size_t repeat = 0; repeat < 3; repeat++)
        test_threads(draw_large_case(role, pool));
}

// ---- The bias

static void test_bias_forward(void) {
    static real without[MOST];
    for (size_t shape = 0; shape < 12; shape++) {
        Case c = draw_case(OUTPUT, false, 5);
        const Array *out = &tensors[OUTPUT];
        fill_all(&c);
        c.biased = false;
        call(&c, NAN);
        memcpy(without, out->data, out->count * sizeof(real));
        c.biased = true;
        call(&c, NAN);
        for (size_t i = 0; i < out->count; i++) {
            real found = out->data[i] - without[i], expected = bias.data[i % c.l.out.c];
            if (close_to(found, expected))
                continue;
            printf("%s: a bias of %.6g adds %.6g to it.\n", element(&c, OUTPUT, i), expected,
                   found);
            if (found == 0)
                printf("The bias was forgotten.\n");
            else
                printf("Each output of channel k gets bias[k], once.\n");
            print_case(&c);
            give_up();
        }
    }
}

static void test_bias_gradient(void) {
    for (size_t shape = 0; shape < 12; shape++) {
        Case c = draw_case(FILTER, false, 5);
        clear(&c, NAN);
        const real before = c.biased ? NAN : 7; // not NaN: it would hide what is added to it
        fill(&bias, before);
        fill(&tensors[OUTPUT], 0.5);
        call(&c, NAN);
        size_t outputs = c.n * c.l.out.h * c.l.out.w;
        for (size_t k = 0; k < c.l.out.c; k++) {
            real found = bias.data[k], expected = 0.5 * (real)outputs;
            if (c.biased ? close_to(found, expected) : found == before)
                continue;
            if (!c.biased)
                printf("This layer has no bias (l->bias_count is 0), but dbias[%zu] was written: "
                       "that memory holds the gradients of the next layer.\n",
                       k);
            else if (isnan(found))
                printf(
                    "dbias[%zu] is still NaN: it was not written, or += was used instead of =.\n",
                    k);
            else
                printf("dbias[%zu] is %.6g, expected %.6g: all %zu numbers of dout that belong to "
                       "channel %zu are 0.5, and dbias is their sum over all images and pixels.\n",
                       k, found, expected, outputs, k);
            print_case(&c);
            give_up();
        }
        if (!c.biased)
            continue;
        size_t at = draw_size(0, tensors[OUTPUT].count - 1);
        fill(&tensors[OUTPUT], 0);
        tensors[OUTPUT].data[at] = 1;
        call(&c, NAN);
        for (size_t k = 0; k < c.l.out.c; k++)
            if (bias.data[k] != (k == at % c.l.out.c)) {
                printf("dbias[%zu] is %.6g: all of dout is 0 except %s = 1, which belongs to "
                       "channel %zu.\n",
                       k, bias.data[k], element(&c, OUTPUT, at), at % c.l.out.c);
                print_case(&c);
                give_up();
            }
    }
}

// ---- Max-pool, forward: what must be true of every output

typedef enum { ANY_SIGN, NEGATIVE, TIES, NUMBERS } Numbers;

static const char *const numbers_are[NUMBERS] = {"numbers from -1 to 1", "only negative numbers",
                                                 "many equal numbers"};

// Whether pixel number `pixel` lies in the window of output number `out`, and at which position.
static bool in_window(const Case *c, size_t out, size_t pixel, Mistake m, size_t *tap) {
    size_t channel = place(out, c->l.out, false).c;
    for (*tap = 0; *tap < c->l.kernel_size * c->l.kernel_size; ++*tap) {
        size_t filter = (*tap * c->l.in.c + channel) * c->l.out.c + channel;
        if (contributes(c, (size_t[ROLES]){out, filter, pixel}, m))
            return true;
    }
    return false;
}

// The first pixel that has this value, in the window or anywhere; the count, if there is none.
static size_t find_pixel(const Case *c, real value, size_t out, Mistake m, bool within) {
    size_t pixel = 0, tap;
    const Array *in = &tensors[IMAGE];
    while (pixel < in->count &&
           !(in->data[pixel] == value && (!within || in_window(c, out, pixel, m, &tap))))
        pixel++;
    return pixel;
}

static void print_pool_effect(const Case *c, real found) {
    const Array *out = &tensors[OUTPUT], *in = &tensors[IMAGE];
    if (found == 0) {
        printf("No pixel is 0. Does the search begin at 0, or do pixels outside of the image count "
               "as 0? They must never be the maximum.\n");
        return;
    }
    for (Mistake m = RIGHT; m < MISTAKES; m++) {
        bool all = true, any = false;
        for (size_t i = 0; i < out->count && all; i++) {
            bool empty = isinf(out->data[i]); // a window without a pixel
            all = empty || find_pixel(c, out->data[i], i, m, true) < in->count;
            any = any || !empty;
        }
        if (all && any && m != RIGHT)
            printf("All numbers look as if %s.\n", effects[m]);
        if (all)
            return;
    }
}

// Prints what is wrong with output number i; false: nothing.
static bool wrong_maximum(const Case *c, size_t i) {
    const Array *in = &tensors[IMAGE];
    real found = tensors[OUTPUT].data[i];
    size_t tap;
    if (isnan(found)) {
        printf("%s is still NaN: it was never written, or numbers outside of `in` were read.\n",
               element(c, OUTPUT, i));
        return true;
    }
    if (find_pixel(c, found, i, RIGHT, true) == in->count) {
        size_t from = find_pixel(c, found, i, RIGHT, false);
        printf("%s is %.6g, which is not in its window", element(c, OUTPUT, i), found);
        printf(from < in->count ? ": it is %s.\n" : ".\n", element(c, IMAGE, from));
        print_pool_effect(c, found);
        return true;
    }
    for (size_t pixel = 0; pixel < in->count; pixel++)
        if (in->data[pixel] > found && in_window(c, i, pixel, RIGHT, &tap)) {
            printf("%s is %.6g, but %s, which lies in its window, is %.6g.\n",
                   element(c, OUTPUT, i), found, element(c, IMAGE, pixel), in->data[pixel]);
            print_pool_effect(c, found);
            return true;
        }
    return false;
}

// Prints what is wrong with its argmax, when all maxima are right; false: nothing.
static bool wrong_argmax(const Case *c, size_t i) {
    const Array *in = &tensors[IMAGE];
    size_t first = c->l.kernel_size * c->l.kernel_size, tap;
    for (size_t pixel = 0; pixel < in->count; pixel++)
        if (in->data[pixel] == tensors[OUTPUT].data[i] && in_window(c, i, pixel, RIGHT, &tap))
            first = min_size(first, tap);
    if (argmax[i] == first)
        return false;
    printf("%s is right, but its argmax is %u, expected %zu (i = %zu, j = %zu)%s.\n",
           element(c, OUTPUT, i), argmax[i], first, first / c->l.kernel_size,
           first % c->l.kernel_size, argmax[i] == 255 ? "; it was not written" : "");
    printf("argmax is i * kernel_size + j of the first maximum, with i and j counted from the "
           "window's upper left corner, which may lie outside of the image.\n");
    return true;
}

static bool written_beside_argmax(size_t count) {
    for (ptrdiff_t i = -GUARD; i < MOST + GUARD; i++)
        if ((i < 0 || i >= (ptrdiff_t)count) && argmax[i] != 255) {
            printf("argmax (w.saved) has %zu bytes, but index %td was written.\n", count, i);
            return true;
        }
    return false;
}

static void fill_image(Array *in, Numbers kind) {
    for (size_t i = 0; i < in->count; i++)
        in->data[i] = kind == TIES       ? -(real)draw_size(1, 2)
                      : kind == NEGATIVE ? -draw_real()
                                         : 2 * draw_real() - 3;
}

static void test_pool_case(const Case *c, Numbers kind) {
    clear(c, NAN);
    fill_image(&tensors[IMAGE], kind);
    fill(&tensors[OUTPUT], NAN);
    memset(argmax_memory, 255, sizeof argmax_memory);
    now_testing = *c;
    run_part(POOL_FORWARD, (Work){.l = &c->l,
                                  .n = c->n,
                                  .in = lend_input(&tensors[IMAGE], "in"),
                                  .out = lend_output(&tensors[OUTPUT], "out"),
                                  .saved = lend_argmax()});
    check_guards(c, NAN);
    size_t count = tensors[OUTPUT].count;
    bool wrong = written_beside_argmax(count);
    for (size_t i = 0; i < count && !wrong; i++)
        wrong = wrong_maximum(c, i);
    for (size_t i = 0; i < count && !wrong; i++)
        wrong = wrong_argmax(c, i);
    if (!wrong)
        return;
    printf("The image has %s.\n", numbers_are[kind]);
    print_case(c);
    print_step(c);
    give_up();
}

static void test_pool_forward(void) {
    for (size_t step = 0; step < STEPS - 1; step++)
        for (size_t shape = 0; shape < 36; shape++) {
            Case c = draw_case(OUTPUT, true, step);
            test_pool_case(&c, (Numbers)(shape / 12));
        }
}

/* Two windows that overlap and have the same maximum: its din is the sum of both douts. This looks
   for one overwritten by the other only; test_layer() finds other mistakes. */
static void test_overlap(void) {
    Case c = draw_case(IMAGE, true, 1);
    c.accumulate = false;
    c.l.stride = 1;
    c.l.out.h = c.l.in.h - c.l.kernel_size + 1;
    c.l.out.w = c.l.in.w - c.l.kernel_size + 1;
    clear(&c, NAN);
    memset(argmax_memory, 0, sizeof argmax_memory);
    argmax[0] = 1; // pixel (0, 1), which is also position 0 of output 1
    tensors[OUTPUT].data[0] = 2;
    tensors[OUTPUT].data[1] = 3;
    call(&c, NAN);
    const Array *din = &tensors[IMAGE];
    bool overwritten = din->data[1] == 3 || din->data[1] == 2;
    for (size_t i = 0; i < din->count; i++)
        overwritten = overwritten && (i == 1 || din->data[i] == 0);
    if (!overwritten)
        return;
    printf("din[0][0][1][0] is %.6g, expected 5: it is the maximum of two windows that overlap, "
           "with dout 2 and 3.\n",
           din->data[1]);
    printf("It gets the sum of both; one was overwritten by the other (= where += is needed).\n");
    print_case(&c);
    give_up();
}

// ---- log-softmax

enum { MOST_CLASSES = 17, MOST_ROWS = 4 };

static Layer log_softmax_layer(size_t classes) {
    return (Layer){.kind = LOG_SOFTMAX, .in = {1, 1, classes}, .out = {1, 1, classes}};
}

// sum over k of dout[k] * log_softmax(in)[k], where in[moved] is larger by `by`
static double weighted(const real *in, const real *dout, size_t classes, size_t moved, double by) {
    real there[MOST_CLASSES], out[MOST_CLASSES];
    double sum = 0;
    memcpy(there, in, classes * sizeof(real));
    there[moved] += by;
    const Layer l = log_softmax_layer(classes);
    log_softmax_forward((Work){.l = &l, .n = 1, .in = there, .out = out});
    for (size_t k = 0; k < classes; k++)
        sum += dout[k] * out[k];
    return sum;
}

// The derivative by in[k], from four points; its error is about 1e-12.
static double slope(const real *in, const real *dout, size_t classes, size_t k) {
    const double h = 2e-3;
    double near = weighted(in, dout, classes, k, h) - weighted(in, dout, classes, k, -h);
    double far = weighted(in, dout, classes, k, 2 * h) - weighted(in, dout, classes, k, -2 * h);
    return (8 * near - far) / (12 * h);
}

typedef enum { MINUS_ONE_HOT, ONE_HOT, ANYTHING, DOUTS } Dout;

static const char *const douts[DOUTS] = {"-1 at the label and 0 elsewhere",
                                         "one positive number and 0 elsewhere", "any numbers"};

// Says with which mistake din[i] would be `found`.
static void print_softmax_effect(double found, const real *dout, const real *out, size_t i,
                                 size_t classes, size_t n) {
    const double softmax = exp((double)out[i]);
    double sum = 0, all = 0;
    for (size_t k = 0; k < n * classes; k++) {
        all += dout[k];
        sum += k / classes == i / classes ? dout[k] : 0;
    }
    const struct {
        double value;
        const char *says;
    } mistakes[] = {
        {dout[i] - softmax,
         "softmax = exp(out) is right, but it was not multiplied by a sum: softmax has "
         "to be multiplied by the sum of this image's dout"},
        {dout[i] + softmax,
         "the sum of dout was taken to be -1: softmax has to be multiplied by the sum "
         "of this image's dout"},
        {dout[i] + softmax * sum, "softmax times the sum has to be subtracted, and was added"},
        {dout[i] - softmax * all,
         "the sum was taken over all images: it is that of this image's dout"},
        {dout[i] - softmax * dout[i],
         "softmax was multiplied by dout[k]: it is multiplied by the sum of "
         "this image's dout over all k"},
        {dout[i] - out[i] * sum,
         "out was taken for softmax, but out holds logarithms: softmax = exp(out)"},
        {dout[i], "din is a copy of dout"},
    };
    for (size_t m = 0; m < sizeof mistakes / sizeof *mistakes; m++)
        if (fabs(found - mistakes[m].value) <= 1e-9) {
            printf("It looks as if %s.\n", mistakes[m].says);
            return;
        }
    printf("softmax[k] = exp(out[k]); its factor is the sum of dout over the classes of the same "
           "image.\n");
}

static void test_softmax_case(Dout kind) {
    size_t n = kind == MINUS_ONE_HOT ? 1 : draw_size(2, MOST_ROWS);
    size_t classes = draw_size(2, MOST_CLASSES), count = n * classes;
    Array *in = &tensors[IMAGE], *dout = &tensors[OUTPUT];
    Array *din = &spare_filter, *out = &spare_image;
    resize(in, count, NAN);
    resize(dout, count, NAN);
    resize(out, count, NAN);
    resize(din, count, NAN);
    for (size_t i = 0; i < count; i++) {
        in->data[i] = 3 * draw_real() - 4;
        dout->data[i] = kind == ANYTHING ? 4 * draw_real() - 6 : 0;
    }
    for (size_t row = 0; row < n && kind != ANYTHING; row++)
        dout->data[row * classes + draw_size(0, classes - 1)] =
            kind == ONE_HOT ? 2 * draw_real() : -1;
    const Layer l = log_softmax_layer(classes);
    log_softmax_forward((Work){.l = &l, .n = n, .in = in->data, .out = out->data});
    fill(din, NAN);
    run_part(SOFTMAX, (Work){.l = &l,
                             .n = n,
                             .in = lend_input(in, "in"),
                             .out = lend_input(out, "out"),
                             .dout = lend_input(dout, "dout"),
                             .din = lend_output(din, "din")});
    if (written_outside(din, NAN) != 0) {
        printf("din has %zu numbers, but index %td was written.\n", count,
               written_outside(din, NAN));
        give_up();
    }
    for (size_t i = 0; i < count; i++) {
        size_t first = i / classes * classes;
        double expected = slope(in->data + first, dout->data + first, classes, i - first);
        double found = din->data[i], off = fabs(found - expected);
        if (off <= 1e-9)
            continue;
        printf("din[%zu][%zu] is %.9g, expected %.9g, the derivative of the sum of dout * out by "
               "in[%zu][%zu].\n",
               i / classes, i % classes, found, expected, i / classes, i % classes);
        if (off < 1e-4)
            printf("It is close, but the only error of a gradient is rounding (here 1e-9): is it "
                   "still a finite difference instead of the formula?\n");
        else if (isnan(found))
            printf("It is still NaN: it was not written, or += was used instead of =.%s\n",
                   i >= classes ? " Image 0 is right: does each image use its own numbers?" : "");
        else
            print_softmax_effect(found, dout->data, out->data, i, classes, n);
        printf("%zu image%s, %zu classes, dout is %s.\n", n, n == 1 ? "" : "s", classes,
               douts[kind]);
        give_up();
    }
}

static void test_softmax(void) {
    for (Dout kind = 0; kind < DOUTS; kind++)
        for (size_t i = 0; i < 12; i++)
            test_softmax_case(kind);
}

// ---- lenet

static Net net; // as the program would build it

static void run_lenet(Shape images, size_t classes) {
    printf("(lenet for images of %zu x %zu x %zu, %zu classes)\n", images.h, images.w, images.c,
           classes);
    shared->images = images;
    shared->classes = classes;
    run_part(LENET, (Work){0});
    net = shared->net;
}

typedef struct Row {
    LayerKind kind;
    size_t kernel_size, stride, padding;
    Shape out;
} Row;

static bool same_shapes(Shape a, Shape b) {
    return a.h == b.h && a.w == b.w && a.c == b.c;
}

static void compare_row(size_t i, const Row *row) {
    const Layer *l = &net.layers[i];
    Layer wanted_layer = {
        .kind = row->kind, .kernel_size = row->kernel_size, .stride = row->stride};
    wanted_layer.padding = row->padding;
    wanted_layer.out = row->out;
    wanted_layer.in = net.layers[i - 1].out;
    wanted_layer.in = (Shape){1, 1, shape_size(wanted_layer.in)};
    char found[64], expected[64];
    describe_layer(l, found, sizeof found);
    describe_layer(&wanted_layer, expected, sizeof expected);
    if (strcmp(found, expected) != 0) {
        printf("Row %zu is `%s`, expected `%s`.\n", i, found, expected);
        give_up();
    }
    if (l->input != i - 1) {
        printf("Row %zu, %s, reads row %zu, expected row %zu: pass each function the row that the "
               "function of the layer before it returned.\n",
               i, found, l->input, i - 1);
        give_up();
    }
    if (!same_shapes(l->out, row->out)) {
        printf("Row %zu, %s, has %zu x %zu x %zu outputs, expected %zu x %zu x %zu.\n", i, found,
               l->out.h, l->out.w, l->out.c, row->out.h, row->out.w, row->out.c);
        give_up();
    }
}

// p1, p2: shapes after the first pool and after the second; c2: after the second convolution
static void check_lenet(Shape in, Shape p1, Shape c2, Shape p2, size_t classes, size_t parameters) {
    const Row rows[] = {{CONV2D, 5, 1, 2, {in.h, in.w, 6}},
                        {RELU, 0, 0, 0, {in.h, in.w, 6}},
                        {MAXPOOL2D, 2, 2, 0, p1},
                        {CONV2D, 5, 1, 0, c2},
                        {RELU, 0, 0, 0, c2},
                        {MAXPOOL2D, 2, 2, 0, p2},
                        {LINEAR, 0, 0, 0, {1, 1, 120}},
                        {RELU, 0, 0, 0, {1, 1, 120}},
                        {LINEAR, 0, 0, 0, {1, 1, 84}},
                        {RELU, 0, 0, 0, {1, 1, 84}},
                        {LINEAR, 0, 0, 0, {1, 1, classes}},
                        {LOG_SOFTMAX, 0, 0, 0, {1, 1, classes}}};
    const size_t count = sizeof rows / sizeof *rows;
    run_lenet(in, classes);
    for (size_t i = 0; i < min_size(count, net.layer_count - 1); i++)
        compare_row(i + 1, &rows[i]);
    if (net.layer_count == count + 1 && net.parameter_count == parameters)
        return;
    printf("The network has %zu rows and %zu parameters, expected %zu and %zu.\n", net.layer_count,
           net.parameter_count, count + 1, parameters);
    give_up();
}

static void test_lenet(void) {
    check_lenet((Shape){28, 28, 1}, (Shape){14, 14, 6}, (Shape){10, 10, 16}, (Shape){5, 5, 16}, 10,
                61706);
    check_lenet((Shape){32, 32, 3}, (Shape){16, 16, 6}, (Shape){12, 12, 16}, (Shape){6, 6, 16}, 10,
                83126);
    check_lenet((Shape){23, 37, 2}, (Shape){11, 18, 6}, (Shape){7, 14, 16}, (Shape){3, 7, 16}, 7,
                53921);
}

// ---- main

int main(int argc, char **argv) {
    set_num_threads(1); // LLVM's OpenMP opens a file when it starts
    if (is_worker(argc, argv))
        serve(call_part);
    const char *given = getenv("SEED");
    seed = given ? strtoull(given, NULL, 10) : (uint64_t)(now() * 1e6) % 1000000;
    start_worker("./lab01", sizeof(Shared));
    test = argc == 2 ? atoi(argv[1]) : 0;
    switch (test) {
    case 1:
        test_layer(OUTPUT, false);
        test_bias_forward();
        break;
    case 2:
        test_layer(FILTER, false);
        test_bias_gradient();
        break;
    case 3:
        test_layer(IMAGE, false);
        break;
    case 4:
        test_pool_forward();
        break;
    case 5:
        test_overlap();
        test_layer(IMAGE, true);
        break;
    case 6:
        test_softmax();
        break;
    case 7:
        test_lenet();
        break;
    default:
        die(EXIT_USAGE, "expected the number of a test, 1 to 7; usage: lab01 NUMBER");
    }
    send_token();
    return 0;
}
