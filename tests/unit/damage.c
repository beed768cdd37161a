/* damage.c - included by checkpoints.c: files as other programs write them, checkpoints with an
   inverted bit or impossible numbers, and gradients that are not finite. */

// The spoiled ones differ from files that are accepted by what is wrong with them alone.
static void test_good_file(void) {
    File f = good_file();
    static const char *const metadata[] = {
        "{\"format\":\"pt\"}", "{}", NULL,
        // of other writers: not interpreted
        "{\"cnn\":\"2\",\"checksum\":\"fnv1a64:0\",\"made_by\":\"a cnn=cnn.checksum=1\"}"};
    for (size_t variant = 0; variant < LENGTH(metadata); variant++) {
        f.metadata = metadata[variant];
        spell_header(&f);
        write_good(&f);
        Ending e = call_in_child(load_spoiled);
        if (e.status != 0 || *e.text)
            fail("status %x, \"%.200s\"", (unsigned)e.status, e.text);
    }
    verdict("checkpoint: a good file is accepted");
}

// PyTorch's older versions write no num_batches_tracked.
static void test_no_counters(void) {
    File f = good_file();
    size_t kept = 0;
    for (size_t i = 0; i < f.count; i++) // they come first
        if (strcmp(f.entries[i].dtype, "I64") != 0)
            f.entries[kept++] = f.entries[i];
    const size_t counters = f.entries[0].begin;
    for (size_t i = 0; i < kept; i++) {
        f.entries[i].begin -= counters;
        f.entries[i].end -= counters;
    }
    f.count = kept;
    f.data_bytes -= counters;
    spell_header(&f);
    write_good(&f);
    spoiled_net.batches_tracked = 5;
    Ending e = call_in_child(load_spoiled);
    if (counters == 0 || e.status != 0 || *e.text)
        fail("%zu bytes of counters, status %x, \"%.200s\"", counters, (unsigned)e.status, e.text);
    load_spoiled();
    if (spoiled_net.batches_tracked != 0)
        fail("%zu batches tracked, expected 0", spoiled_net.batches_tracked);
    verdict("checkpoint: without counters of batches");
}

// The file of test_unfinite_checkpoint(); write_flipped() writes it with one bit inverted.
static uint8_t saved_bytes[16384];
static size_t saved_size;

static void read_saved(void) {
    FILE *f = fopen(checkpoint_path, "rb");
    if (!f || (saved_size = fread(saved_bytes, 1, sizeof saved_bytes, f)) == 0 || fclose(f) != 0)
        fail("cannot read %s", checkpoint_path);
}

static void write_flipped(size_t bit) {
    FILE *f = fopen(checkpoint_path, "wb");
    saved_bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    if (!f || fwrite(saved_bytes, 1, saved_size, f) != saved_size || fclose(f) != 0)
        fail("cannot write %s", checkpoint_path);
    saved_bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
}

// With any bit inverted, the file is refused.
static void test_flipped_bits(void) {
    static const Series series = {"inverted bit", write_flipped};
    const size_t stride = quick ? 7 : 1;
    for (size_t bit = 0; bit < 8 * saved_size; bit += 200 * stride) {
        size_t last = min_size(bit + 200, 8 * saved_size);
        Report r = run_series(&series, bit, last);
        if (r.refused != last - bit)
            fail("bits %zu to %zu: %zu files accepted", bit, last, r.accepted);
    }
    verdict("checkpoint: a file with an inverted bit is refused");
}

static void write_variance(real value) {
    File f = good_file();
    spell_header(&f);
    write_good(&f);
    size_t at = 0;
    while (!strstr(f.entries[at].name, "running_var"))
        at++;
    FILE *file = fopen(checkpoint_path, "r+b");
    if (!file || fseek(file, (long)(8 + strlen(f.header) + f.entries[at].begin), 0) != 0 ||
        fwrite(&value, sizeof value, 1, file) != 1 || fclose(file) != 0)
        fail("cannot change %s", checkpoint_path);
}

static void test_negative_variance(void) {
    write_variance(1);
    Ending e = call_in_child(load_spoiled);
    if (e.status != 0)
        fail("1: status %x, \"%.200s\"", (unsigned)e.status, e.text);
    write_variance(-1);
    expect_refusal("a negative variance", "expected finite, non-negative numbers");
    verdict("checkpoint: a negative variance is refused");
}

static void update_with_nan(void) {
    static Run run;
    run.net = spoiled_net;
    run.kernels = spoiled_net.kernels;
    run.device = spoiled_net.device;
    run.settings.log_interval = 2;
    run.epoch = 2;
    run.batch_index = 4;
    update_weights(&run);
}

// Before the update, at the log interval: the loss may still be finite then.
static void test_unfinite_gradient(void) {
    for (size_t i = 1; i < spoiled_net.layer_count; i++) {
        const Layer *l = &spoiled_net.layers[i];
        char words[128];
        for (size_t k = 0; k < 2; k++) {
            real *at = spoiled_net.grads + (k ? l->bias_offset : l->weight_offset);
            if ((k ? l->bias_count : l->weight_count) == 0)
                continue;
            *at = k ? (real)NAN : (real)-INFINITY;
            snprintf(words, sizeof words, "epoch 2, step 5: the gradient of %s.%s is not finite",
                     l->name, k ? "bias" : "weight");
            Ending e = call_in_child(update_with_nan);
            if (!WIFEXITED(e.status) || WEXITSTATUS(e.status) != 1 || !is_refusal(e.text, words))
                fail("status %x, \"%.200s\", expected %s", (unsigned)e.status, e.text, words);
            *at = 0;
        }
    }
    verdict("a gradient that is not finite ends the run and is named");
}

static void test_damage(void) {
    test_negative_variance();
    test_flipped_bits();
    test_unfinite_gradient();
}
