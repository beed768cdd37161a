/* checkpoints.c - section 11 of cnn.c: weights in PyTorch's order, checkpoints that are saved
   and loaded, and files with numbers that are not finite or with inverted bits, which must be
   refused. Headers that lie: tests/program/test_checkpoints.sh and tests/robust/fuzz.c. */

#include <setjmp.h>
#include <sys/mman.h>

/* ---- Weights in PyTorch's order -------------------------------------------------------------- */

// Weights that hold their own index, which shows where each one went.
static void check_permutation(Shape s, size_t outputs) {
    size_t count = shape_size(s) * outputs;
    Array from = array(count, 0), got = array(count, guard_value), want = array(count, 0);
    for (size_t i = 0; i < count; i++)
        from.at[i] = (real)i;
    for (size_t y = 0; y < s.h; y++)
        for (size_t x = 0; x < s.w; x++)
            for (size_t c = 0; c < s.c; c++)
                for (size_t k = 0; k < outputs; k++)
                    want.at[((k * s.c + c) * s.h + y) * s.w + x] =
                        (real)(((y * s.w + x) * s.c + c) * outputs + k);
    reorder_weight(got.at, from.at, s, outputs, TO_FILE);
    check_tensor("weight", got.at, want.at, NULL, count);
    reorder_weight(got.at, want.at, s, outputs, FROM_FILE);
    check_tensor("weight and back", got.at, from.at, NULL, count);
    check_guards("weight", &got);
    free_arrays((Array[]){from, got, want}, 3 * sizeof(Array));
}

static void test_to_pytorch(void) {
    check_permutation((Shape){3, 3, 2}, 5);
    check_permutation((Shape){4, 3, 5}, 6);
    check_permutation((Shape){1, 1, 7}, 3);
    verdict("weights in PyTorch's order, and back");
}

/* ---- Files ----------------------------------------------------------------------------------- */

static char checkpoint_path[PATH_SIZE];

static void use_temporary_file(void) {
    temporary_name(checkpoint_path);
    int file = mkstemp(checkpoint_path);
    if (file < 0)
        fail("cannot create %s", checkpoint_path);
    else
        close(file);
}

// A file in memory, which children inherit: thousands of them would wear out a disk's patience.
static void use_memory_file(void) {
    int file = memfd_create("checkpoint", 0);
    snprintf(checkpoint_path, sizeof checkpoint_path, "/proc/self/fd/%d", file);
    if (file < 0)
        fail("cannot create a file in memory");
}

static void fill_random(real *to, size_t count) {
    for (size_t i = 0; i < count; i++)
        to[i] = draw_real();
}

static void build_for_checkpoint(Net *net, const char *model, const Settings *settings) {
    DatasetInfo info = dataset_for(find_model(model), "synthetic");
    net_build(net, find_model(model), &info, settings, &naive_kernels);
    plan_net(net, 1, 0);
    net_alloc(net);
}

static void save_or_load(Net *net, const Optimizer *o, real *state, char *metadata, bool save) {
    if (save) {
        save_tensors(net, o, state, metadata, checkpoint_path);
    } else {
        TensorFile f;
        open_tensors(&f, checkpoint_path);
        snprintf(metadata, METADATA_SIZE, "%s", f.metadata);
        read_tensors(&f, net, o, state);
    }
}

// The parameters among the numbers of an arena; what lies between tensors is no part of a file.
static void compare_parameters(const char *name, const Net *net, const real *got,
                               const real *want) {
    for (size_t i = 0; i < net->layer_count; i++) {
        const Layer *l = &net->layers[i];
        check_tensor(name, got + l->weight_offset, want + l->weight_offset, NULL, l->weight_count);
        check_tensor(name, got + l->bias_offset, want + l->bias_offset, NULL, l->bias_count);
    }
}

static void compare_loaded(const Net *got, const Net *want, const real *got_state,
                           const real *want_state, size_t states) {
    compare_parameters("parameters", want, got->params, want->params);
    for (size_t i = 0; i < states; i++)
        compare_parameters("optimizer", want, got_state + i * want->param_size,
                           want_state + i * want->param_size);
    for (size_t i = 0; i < want->layer_count; i++) {
        const Layer *l = &want->layers[i];
        size_t count = l->kind == BATCHNORM2D ? 2 * l->out.c : 0;
        check_tensor("running statistics", got->stats + got->row_plans[i].stats,
                     want->stats + want->row_plans[i].stats, NULL, count);
    }
    if (got->batches_tracked != want->batches_tracked)
        fail("%zu batches tracked, expected %zu", got->batches_tracked, want->batches_tracked);
}

static void test_round_trip(const char *model, const Optimizer *o, double momentum) {
    static Net saved, loaded;
    Settings settings = plain;
    settings.momentum = momentum;
    settings.optimizer = (OptimizerChoice)(o - optimizers);
    size_t states = count_states(&optimizers[settings.optimizer], &settings);
    char metadata[METADATA_SIZE] = "format=pt\nepoch=3\nbatch=17\nmodel=x y\n";
    const char *want = "format=pt\nepoch=3\nbatch=17\nmodel=x y\ncnn.version=3\n"
                       "cnn.checksum=fnv1a64:";
    build_for_checkpoint(&saved, model, &settings);
    build_for_checkpoint(&loaded, model, &settings);
    Array state = random_array(states * saved.param_size);
    Array other = array(states * saved.param_size, guard_value);
    for (size_t i = 0; i < state.count; i++) // as variances they are not negative
        state.at[i] = (real)fabs((double)state.at[i]);
    fill_random(saved.params, saved.param_size);
    for (size_t i = 0; i < saved.stats_size; i++)
        saved.stats[i] = (real)fabs((double)draw_real());
    saved.batches_tracked = saved.stats_size ? (size_t)1 << 40 : 0;
    save_or_load(&saved, o, state.at, metadata, true);
    save_or_load(&loaded, o, other.at, metadata, false);
    compare_loaded(&loaded, &saved, other.at, state.at, states);
    if (strncmp(metadata, want, strlen(want)) != 0 || strlen(metadata) != strlen(want) + 17)
        fail("metadata \"%s\", expected \"%s\"", metadata, want);
    free_arrays((Array[]){state, other}, 2 * sizeof(Array));
    memory_plan_free(&saved.plan);
    memory_plan_free(&loaded.plan);
    char name[96];
    snprintf(name, sizeof name, "checkpoint of %s with %s and momentum %g, and back", model,
             o == &optimizers[SGD] ? "sgd" : "adadelta", momentum);
    verdict("%s", name);
}

// Files for this network are small enough to be spoiled in every way.
static size_t build_spoiled(Net *net, size_t x) {
    x = batchnorm2d(net, conv2d_bias(net, x, 2, 1, 1, 0, false));
    return log_softmax(net, linear(net, x, net->classes));
}
static const Model spoiled_model = {.name = "spoiled", .build = build_spoiled};
static Net spoiled_net;

// An entry of a header, as it will be written.
typedef struct Entry {
    char name[40], dtype[16], shape[96];
    size_t begin, end;
} Entry;

typedef struct File {
    Entry entries[16];
    size_t count, data_bytes;
    char header[8192];
    const char *metadata; // NULL: none
} File;

static File good_file(void) {
    File f = {.metadata = "{\"format\":\"pt\"}"};
    TensorList list = list_tensors(&spoiled_net);
    qsort(list.tensors, list.count, sizeof *list.tensors, compare_names);
    f.count = list.count;
    for (size_t i = 0; i < f.count; i++) {
        Entry *e = &f.entries[i];
        snprintf(e->name, sizeof e->name, "%.39s", list.tensors[i].name);
        snprintf(e->dtype, sizeof e->dtype, "%s", list.tensors[i].dtype);
        snprintf(e->shape, sizeof e->shape, "%s", list.tensors[i].shape);
        e->begin = f.data_bytes;
        e->end = f.data_bytes = e->begin + list.tensors[i].bytes;
    }
    free(list.tensors);
    return f;
}

static void spell_header(File *f) {
    size_t at = 1, size = sizeof f->header;
    strcpy(f->header, "{");
    if (f->metadata)
        at += (size_t)snprintf(f->header + at, size - at, "\"__metadata__\":%s", f->metadata);
    for (const Entry *e = f->entries; e < f->entries + f->count; e++)
        at += (size_t)snprintf(
            f->header + at, size - at,
            "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
            at > 1 ? "," : "", e->name, e->dtype, e->shape, e->begin, e->end);
    strcpy(f->header + at, "}");
}

// length: what the first 8 bytes say; header: as many bytes as are there
static void write_bytes(uint64_t length, const char *header, size_t bytes, size_t data_bytes) {
    static const uint8_t data[8192];
    FILE *f = fopen(checkpoint_path, "wb");
    if (!f) {
        fail("cannot write %s", checkpoint_path);
        return;
    }
    for (int byte = 0; byte < 8; byte++)
        fputc((int)(length >> (8 * byte) & 255), f);
    fwrite(header, 1, bytes, f);
    fwrite(data, 1, data_bytes, f);
    fclose(f);
}

static void write_good(const File *f) {
    write_bytes(strlen(f->header), f->header, strlen(f->header), f->data_bytes);
}

static void load_spoiled(void) {
    char metadata[METADATA_SIZE];
    // an optimizer that keeps nothing: the file may hold no optimizer's numbers
    save_or_load(&spoiled_net, &optimizers[1], spoiled_net.scratch, metadata, false);
}

static void save_spoiled(void) {
    char metadata[METADATA_SIZE] = "format=pt\nepoch=1\n";
    save_or_load(&spoiled_net, NULL, NULL, metadata, true);
}

// How a child ended, and what it said.
typedef struct Ending {
    int status;
    char text[4096];
} Ending;

static Ending call_in_child(void (*call)(void)) {
    Ending e = {0};
    int ends[2];
    size_t length = 0;
    fflush(stdout);
    pid_t child = pipe(ends) == 0 ? fork() : -1;
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        // before the sanitizer's own end, which would search a child for leaks
        exit_process = _exit;
        alarm(20); // a hang ends by a signal
        call();
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got = 1; got > 0; length += (size_t)got)
        got = read(ends[0], e.text + length, sizeof e.text - 1 - length);
    close(ends[0]);
    if (child < 0 || waitpid(child, &e.status, 0) != child)
        fail("no child");
    return e;
}

// One line that begins as all errors of cnn do, and holds these words.
static bool is_refusal(const char *text, const char *words) {
    const char *end = strchr(text, '\n');
    return strncmp(text, "cnn: error: ", 12) == 0 && end && !end[1] && strstr(text, words);
}

static void expect_refusal(const char *what, const char *words) {
    Ending e = call_in_child(load_spoiled);
    if (!WIFEXITED(e.status) || WEXITSTATUS(e.status) != 1)
        fail("%s: expected exit status 1, found %x", what, (unsigned)e.status);
    else if (!is_refusal(e.text, words))
        fail("%s: expected one line with \"%s\", found \"%.200s\"", what, words, e.text);
}

static Entry *last_entry(File *f) {
    return &f->entries[f->count - 1];
}

/* Thousands of files in one child: die() calls before_dying, which jumps back here. What the
   refused ones had open or allocated is lost with the child. */
typedef struct Report {
    size_t refused, accepted;
    char failure[256];
} Report;
static jmp_buf refused;

static void jump_back(void) {
    longjmp(refused, 1);
}

// Loads the file; its line on stderr has to be as it should, and only one.
static void try_file(Report *r, int messages, const char *what, size_t number) {
    char text[8192];
    volatile bool died = true;
    if (ftruncate(messages, 0) != 0)
        return;
    before_dying = jump_back;
    dying = dying_here = false; // of the file before
    if (setjmp(refused) == 0) {
        load_spoiled();
        died = false;
    }
    ssize_t length = pread(messages, text, sizeof text - 1, 0);
    text[length > 0 ? length : 0] = 0;
    if (!*r->failure && (died ? !is_refusal(text, "") : length != 0))
        snprintf(r->failure, sizeof r->failure, "%s %zu: found \"%.150s\"", what, number, text);
    r->refused += died;
    r->accepted += !died;
}

typedef struct Series {
    const char *name;
    void (*write)(size_t number); // writes file number 0, 1, ...
} Series;

// In the child: stderr is an empty file, at whose end each message is written.
static void try_files(const Series *s, size_t first, size_t last, int to_parent) {
    Report r = {0};
    FILE *messages = tmpfile();
    if (!messages || dup2(fileno(messages), STDERR_FILENO) < 0 ||
        fcntl(STDERR_FILENO, F_SETFL, O_APPEND) < 0)
        snprintf(r.failure, sizeof r.failure, "cannot redirect stderr");
    alarm(60);
    for (size_t i = first; i < last && !*r.failure; i++) {
        s->write(i);
        try_file(&r, STDERR_FILENO, s->name, i);
    }
    _exit(write(to_parent, &r, sizeof r) != sizeof r);
}

static Report run_series(const Series *s, size_t first, size_t last) {
    Report r = {0};
    int ends[2], status = 0;
    fflush(stdout);
    pid_t child = pipe(ends) == 0 ? fork() : -1;
    if (child == 0)
        try_files(s, first, last, ends[1]);
    close(ends[1]);
    bool reported = read(ends[0], &r, sizeof r) == sizeof r;
    close(ends[0]);
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0 || !reported)
        fail("%s %zu to %zu: a child ended with status %x", s->name, first, last, (unsigned)status);
    else if (*r.failure)
        fail("%s", r.failure);
    return r;
}

static void test_unfinite_file(void) {
    static const real values[2] = {(real)NAN, (real)-INFINITY};
    File f = good_file();
    spell_header(&f);
    for (size_t i = 0; i < 2; i++) {
        write_good(&f);
        FILE *file = fopen(checkpoint_path, "r+b");
        bool good =
            file && fseek(file, (long)(8 + strlen(f.header) + last_entry(&f)->begin), 0) == 0;
        if (!good || fwrite(&values[i], sizeof(real), 1, file) != 1 || fclose(file) != 0)
            fail("cannot change %s", checkpoint_path);
        expect_refusal("a number that is not finite", "fc1.weight: expected finite numbers");
    }
    verdict("checkpoint: numbers that are not finite are refused");
}

// What has overflowed is no checkpoint to go on from: the one before stays.
static void test_unfinite_checkpoint(void) {
    real *at = spoiled_net.params + spoiled_net.layers[1].weight_offset, kept = *at;
    static const real values[3] = {(real)NAN, (real)INFINITY, (real)-INFINITY};
    save_spoiled();
    for (size_t i = 0; i < 3; i++) {
        *at = values[i];
        Ending e = call_in_child(save_spoiled);
        if (!WIFEXITED(e.status) || WEXITSTATUS(e.status) != 1 ||
            !is_refusal(e.text, "conv1.weight is not finite"))
            fail("%g: status %x, \"%.200s\"", (double)*at, (unsigned)e.status, e.text);
    }
    load_spoiled();
    char temporary[sizeof checkpoint_path + 8];
    snprintf(temporary, sizeof temporary, "%s.tmp", checkpoint_path);
    if (*at != kept || access(temporary, F_OK) == 0)
        fail("the file before is not there any more, or one beside it is");
    verdict("checkpoint: none is written of numbers that are not finite");
}

#include "damage.c"

static void test_checkpoints(void) {
    DatasetInfo info = {"test", {2, 2, 1}, .classes = 2};
    test_to_pytorch();
    use_temporary_file();
    test_round_trip("mnist", &optimizers[0], 0);
    test_round_trip("mnist", &optimizers[1], 0);
    test_round_trip("resnet8", &optimizers[0], 0);
    test_round_trip("resnet8", &optimizers[1], .9);
    net_build(&spoiled_net, &spoiled_model, &info, &plain, &naive_kernels);
    plan_net(&spoiled_net, 1, 0);
    net_alloc(&spoiled_net);
    test_unfinite_checkpoint();
    read_saved();
    unlink(checkpoint_path);
    use_memory_file();
    test_good_file();
    test_no_counters();
    test_unfinite_file();
    test_damage();
    memory_plan_free(&spoiled_net.plan);
}
