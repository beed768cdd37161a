/* data.c - sections 8 and 9 of cnn.c: CIFAR's files, synthetic images, the order in which the
   loader gives images to one rank and to several, augmentation. */

/* ---- CIFAR's files --------------------------------------------------------------------------- */

enum { CIFAR_PIXELS = 32 * 32, CIFAR_RECORDS = 3 };

// Byte `channel, pixel` of record `number`.
static uint8_t cifar_byte(size_t number, size_t channel, size_t pixel) {
    return (uint8_t)(number * 91 + channel * 57 + pixel * 7 + pixel / 256);
}

static void write_cifar(const char *path, size_t label_bytes, size_t first) {
    FILE *f = fopen(path, "wb");
    for (size_t i = first; f && i < first + CIFAR_RECORDS; i++) {
        if (label_bytes == 2)
            fputc(19 - (int)i, f); // the coarse label, which is not the one to take
        fputc((int)i + 1, f);
        for (size_t channel = 0; channel < 3; channel++)
            for (size_t pixel = 0; pixel < CIFAR_PIXELS; pixel++)
                fputc(cifar_byte(i, channel, pixel), f);
    }
    if (!f || fclose(f) != 0)
        fail("cannot write %s", path);
}

// Two files of three records each, of which `limit` are kept.
static void check_cifar(const char *dir, size_t classes, size_t limit) {
    const DatasetInfo info = {.name = "cifar",
                              .shape = {32, 32, 3},
                              .classes = classes,
                              .counts = {2 * CIFAR_RECORDS},
                              .files = {{"one", "two"}}};
    Dataset data = {.info = &info};
    read_cifar_set(&data, dir, TRAINING_SET, limit);
    if (data.count != min_size(limit, 2 * CIFAR_RECORDS))
        fail("%zu classes: %zu images of at most %zu", classes, data.count, limit);
    for (size_t i = 0; i < data.count; i++) {
        if (data.labels[i] != i + 1)
            fail("%zu classes: image %zu has label %u", classes, i, data.labels[i]);
        for (size_t p = 0; p < 3 * CIFAR_PIXELS; p++)
            if (data.images[i * 3 * CIFAR_PIXELS + p] != cifar_byte(i, p % 3, p / 3))
                fail("%zu classes: byte %zu of image %zu is wrong", classes, p, i);
    }
    free_dataset(&data);
}

static void test_cifar_files(void) {
    char dir[PATH_SIZE], one[PATH_SIZE], two[PATH_SIZE];
    temporary_name(dir);
    if (!mkdtemp(dir))
        fail("cannot create %s", dir);
    join_path(one, dir, "one");
    join_path(two, dir, "two");
    for (size_t label_bytes = 1; label_bytes <= 2; label_bytes++) {
        write_cifar(one, label_bytes, 0);
        write_cifar(two, label_bytes, CIFAR_RECORDS);
        for (size_t limit = 1; limit < 8 && !*failure; limit++)
            check_cifar(dir, label_bytes == 2 ? 100 : 10, limit);
    }
    unlink(one);
    unlink(two);
    rmdir(dir);
    verdict("CIFAR's files: labels, order of the bytes, limit");
}

// Records of any size can be skipped. The first byte of each is its number.
static void test_large_records(void) {
    enum { RECORDS = 3, BYTES = 100000 };
    char dir[PATH_SIZE], path[PATH_SIZE];
    DataFile f;
    temporary_name(dir);
    if (!mkdtemp(dir))
        fail("cannot create %s", dir);
    join_path(path, dir, "records");
    FILE *written = fopen(path, "wb");
    for (size_t i = 0; written && i < RECORDS * BYTES; i++)
        fputc((int)(i / BYTES), written);
    if (!written || fclose(written) != 0)
        fail("cannot write %s", path);
    data_open(&f, dir, "records", "test");
    uint8_t *records = read_records(&f, 0, BYTES, RECORDS, 2);
    if (records[0] != 0 || records[BYTES] != 1)
        fail("records 0 and 1 begin with %u and %u", records[0], records[BYTES]);
    free(records);
    unlink(path);
    rmdir(dir);
    verdict("large records: two are kept, one is skipped");
}

/* ---- Synthetic images ------------------------------------------------------------------------ */

/* Every class is drawn as often as the others, and has a glyph: in the middle of its images the
   pixels vary by more than noise and another class's faint glyph, whose variances are 490 and some
   400. */
static void test_synthetic_classes(void) {
    enum { MIDDLE = 10, SHOWN = 3000, NOISE = 1500 };
    const DatasetInfo info = dataset_for(find_model("mnist"), "synthetic");
    Dataset data = {.info = &info};
    make_synthetic(&data, TRAINING_SET, SHOWN);
    for (size_t label = 0; label < info.classes; label++) {
        double count = 0, variance = 0;
        for (size_t i = 0; i < data.count; i++) {
            double sum = 0, squares = 0;
            for (size_t p = 0; p < MIDDLE * MIDDLE && data.labels[i] == label; p++) {
                const double pixel = data.images[(i * 28 + 9 + p / MIDDLE) * 28 + 9 + p % MIDDLE];
                sum += pixel / (MIDDLE * MIDDLE);
                squares += pixel * pixel / (MIDDLE * MIDDLE);
            }
            variance += squares - sum * sum;
            count += data.labels[i] == label;
        }
        if (fabs(count - SHOWN / 10.) > 60 || variance / count < NOISE)
            fail("class %zu: %g of %d images, variance %g", label, count, SHOWN, variance / count);
    }
    free_dataset(&data);
    verdict("synthetic images: each class has a glyph");
}

// Where no glyph reaches, above row 5, there is gray with uniform noise, whose variance is
// 0.3^2 (256^2 - 1) / 12.
static void test_synthetic_noise(void) {
    enum { NOISY = 100, PIXELS = 28 * 5 };
    const DatasetInfo info = dataset_for(find_model("mnist"), "synthetic");
    Dataset data = {.info = &info};
    make_synthetic(&data, TRAINING_SET, NOISY);
    double mean = 0, squares = 0;
    for (size_t i = 0; i < NOISY * PIXELS; i++) {
        const double pixel = data.images[i / PIXELS * 28 * 28 + i % PIXELS] + .5; // rounded down
        mean += pixel / (NOISY * PIXELS);
        squares += pixel * pixel / (NOISY * PIXELS);
    }
    if (fabs(mean - 100) > 1 || fabs(squares - mean * mean - 491.5) > 15)
        fail("mean %g, variance %g; expected 100, 491.5", mean, squares - mean * mean);
    free_dataset(&data);
    verdict("synthetic images: noise");
}

// The images of all versions are the same, up to the last digits of cos() and exp(): some numbers
// from the middle of the third training image of mnist, and of the third test image of cifar.
static void test_synthetic_pixels(void) {
    static const struct {
        const char *model;
        uint8_t label, pixels[12];
    } expected[] = {{"mnist", 9, {149, 150, 86, 96, 95, 111, 120, 139, 149, 74, 68, 91}},
                    {"cifar", 7, {120, 149, 55, 158, 174, 59, 137, 191, 8, 134, 203, 56}}};
    for (size_t k = 0; k < 2; k++) {
        const DatasetInfo info = dataset_for(find_model(expected[k].model), "synthetic");
        const Shape s = info.shape;
        Dataset data = {.info = &info};
        make_synthetic(&data, k == 0 ? TRAINING_SET : TEST_SET, 3);
        const uint8_t *row = data.images + (2 * s.h + s.h / 2) * s.w * s.c + (s.w / 2 - 6) * s.c;
        for (size_t i = 0; i < 12; i++)
            if (abs(row[i] - expected[k].pixels[i]) > 1)
                fail("%s, number %zu: %d, expected %d", expected[k].model, i, row[i],
                     expected[k].pixels[i]);
        if (data.labels[2] != expected[k].label)
            fail("%s: label %d, expected %d", expected[k].model, data.labels[2], expected[k].label);
        free_dataset(&data);
    }
    verdict("synthetic images: as in other versions");
}

/* ---- Loader ---------------------------------------------------------------------------------- */

enum { IMAGES = 103, LOAD_BATCH = 8, LOAD_BATCHES = 13 };
static const DatasetInfo tiny_info = {.name = "tiny",
                                      .shape = {1, 2, 3},
                                      .classes = 10,
                                      .counts = {IMAGES},
                                      .mean = {.1, .2, .3},
                                      .std = {.5, .25, .125}};

// Each image holds its own number: times 1, 2, ... 6, modulo 251, in its six bytes.
static Dataset tiny_dataset(void) {
    static uint8_t images[IMAGES * 6], labels[IMAGES];
    for (size_t i = 0; i < IMAGES; i++) {
        labels[i] = (uint8_t)(i % 10);
        for (size_t p = 0; p < 6; p++)
            images[i * 6 + p] = (uint8_t)((i + 1) * (p + 1) % 251);
    }
    return (Dataset){&tiny_info, IMAGES, images, labels};
}

static size_t image_number(const Batch *batch, size_t i) {
    const real *pixels = batch->images + i * 6;
    size_t number = (size_t)lround(((double)pixels[0] * .5 + .1) * 255) - 1;
    for (size_t p = 0; p < 6; p++) {
        double mean = tiny_info.mean[p % 3], std = tiny_info.std[p % 3];
        double want = ((double)((number + 1) * (p + 1) % 251) / 255 - mean) / std;
        if (!(fabs((double)pixels[p] - want) < 64 * epsilon))
            fail("pixel %zu of image %zu is %g, expected %g", p, number, (double)pixels[p], want);
    }
    if (batch->labels[i] != number % 10)
        fail("image %zu has label %u", number, batch->labels[i]);
    return number;
}

// Runs through the batches of an epoch that was started; the images in the order they came.
static void read_epoch(Loader *l, size_t order[IMAGES]) {
    size_t seen[IMAGES] = {0}, count = 0, batches = 0;
    for (const Batch *b; (b = loader_next(l)); batches++) {
        if (b->key.first != count || b->n != min_size(LOAD_BATCH, IMAGES - count)) {
            fail("batch %zu: %zu images from position %zu on", batches, b->n, b->key.first);
            return;
        }
        for (size_t i = 0; i < b->n; i++) {
            size_t number = image_number(b, i);
            if (number >= IMAGES || seen[number]++)
                fail("image %zu came twice or does not exist", number);
            order[count++] = number;
        }
    }
    if (batches != LOAD_BATCHES || count != IMAGES)
        fail("%zu batches with %zu images", batches, count);
}

static void test_loader_order(void) {
    static size_t orders[2][4][IMAGES];
    Dataset data = tiny_dataset();
    for (size_t run = 0; run < 2; run++) {
        Loader l;
        plan_loader(&l, &data, LOAD_BATCH, run ? 4 : 1, NULL, on_cpu);
        for (size_t epoch = 0; epoch < 4; epoch++) {
            loader_start(&l, 11, epoch, 0);
            read_epoch(&l, orders[run][epoch]);
        }
        loader_free(&l);
    }
    for (size_t i = 0; i < IMAGES; i++)
        if (orders[0][0][i] != i)
            fail("epoch 0 is not in the order of the file");
    for (size_t epoch = 0; epoch + 1 < 4; epoch++)
        if (memcmp(orders[0][epoch], orders[0][epoch + 1], sizeof orders[0][0]) == 0)
            fail("epochs %zu and %zu have the same order", epoch, epoch + 1);
    if (memcmp(orders[0], orders[1], sizeof orders[0]) != 0)
        fail("4 workers give another order than 1");
    verdict("loader: each image once, the same order for 1 and 4 workers");
}

/* Rank `rank` of `world` gets positions rank, rank + world, ... of an epoch. In training the first
   images come again at the end, so that all ranks have as many; in a test (epoch 0) none does. */
static void check_share(const Dataset *data, const size_t *whole, size_t rank, size_t world,
                        size_t epoch) {
    Loader l;
    Consumer consumer = on_cpu;
    consumer.rank = rank;
    consumer.ranks = world;
    plan_loader(&l, data, LOAD_BATCH, 2, NULL, consumer);
    loader_start(&l, 11, epoch, 0);
    snprintf(context, sizeof context, "rank %zu of %zu, epoch %zu", rank, world, epoch);
    size_t position = rank, n = 0, share = ceil_div(IMAGES, world);
    for (const Batch *batch; (batch = loader_next(&l)); n += batch->n)
        for (size_t i = 0; i < batch->n; i++, position += world) {
            size_t want = epoch ? whole[position % IMAGES] : position;
            if (batch->labels[i] != data->labels[want] || position_of(batch->key, i) != position)
                fail("another image at position %zu", position);
        }
    if (epoch == 0)
        share = rank < IMAGES ? ceil_div(IMAGES - rank, world) : 0;
    if (n != share)
        fail("%zu images, expected %zu", n, share);
    loader_free(&l);
}

static void test_loader_shares(void) {
    static const size_t some[] = {2, 3, 4, 5, 8, 13, 52, IMAGES - 1, IMAGES, IMAGES + 3};
    static size_t whole[IMAGES];
    Dataset data = tiny_dataset();
    Loader l;
    plan_loader(&l, &data, LOAD_BATCH, 1, NULL, on_cpu);
    loader_start(&l, 11, 3, 0);
    read_epoch(&l, whole);
    loader_free(&l);
    for (size_t i = 0; i < (quick ? sizeof some / sizeof *some : IMAGES + 2); i++) {
        const size_t world = quick ? some[i] : i + 2;
        for (size_t rank = 0; rank < world; rank++) {
            check_share(&data, whole, rank, world, 0);
            check_share(&data, whole, rank, world, 3);
        }
    }
    verdict("loader: the shares of several ranks");
}

static void test_loader_left_early(void) {
    static size_t want[IMAGES], got[IMAGES];
    Dataset data = tiny_dataset();
    Loader l;
    plan_loader(&l, &data, LOAD_BATCH, 3, NULL, on_cpu);
    loader_start(&l, 11, 5, 0);
    read_epoch(&l, want);
    for (size_t round = 0; round < 200; round++) {
        loader_start(&l, 11, 6, 0);
        for (size_t taken = 0; taken < round % LOAD_BATCHES; taken++)
            loader_next(&l);
        loader_start(&l, 11, 5, 0);
        read_epoch(&l, got);
        if (memcmp(want, got, sizeof want) != 0)
            fail("an epoch left after %zu batches shows in the next", round % LOAD_BATCHES);
    }
    loader_free(&l);
    verdict("loader: an epoch left early, then a fresh one");
}

/* ---- Augmentation ---------------------------------------------------------------------------- */

enum { CROP_H = 6, CROP_W = 5, CROP_SIZE = CROP_H * CROP_W * 3, CROP_REACH = 4, CROP_VIEWS = 162 };
static const Shape crop_shape = {CROP_H, CROP_W, 3};

// View number v of 9 x 9 x 2: the image in a black frame, another part cut out, maybe mirrored.
static void cut_view(uint8_t *out, const uint8_t *in, size_t v) {
    static uint8_t frame[CROP_H + 2 * CROP_REACH][CROP_W + 2 * CROP_REACH][3];
    memset(frame, 0, sizeof frame);
    for (size_t y = 0; y < CROP_H; y++)
        memcpy(frame[y + CROP_REACH][CROP_REACH], in + y * CROP_W * 3, sizeof(uint8_t[CROP_W][3]));
    for (size_t y = 0; y < CROP_H; y++)
        for (size_t x = 0; x < CROP_W; x++) {
            size_t from = v % 2 ? CROP_W - 1 - x : x;
            memcpy(out + (y * CROP_W + x) * 3, frame[y + v / 2 / 9][from + v / 2 % 9], 3);
        }
}

// Which of the views an image is; CROP_VIEWS: none
static size_t find_view(const uint8_t *image, const uint8_t *original) {
    uint8_t view[CROP_SIZE];
    size_t v = 0;
    for (; v < CROP_VIEWS; v++) {
        cut_view(view, original, v);
        if (memcmp(view, image, CROP_SIZE) == 0)
            break;
    }
    return v;
}

static void test_crop_flip(void) {
    enum { DRAWS = 6000 };
    size_t found[CROP_VIEWS + 1] = {0};
    uint8_t in[CROP_SIZE], out[CROP_SIZE];
    for (size_t i = 0; i < CROP_SIZE; i++)
        in[i] = (uint8_t)(i + 1);
    for (size_t i = 0; i < DRAWS; i++) {
        RandomKey key = {.seed = 4 + i / 2000, .epoch = 1 + i / 500, .first = i, .stride = 1};
        augment_crop_flip(out, in, crop_shape, &key);
        found[find_view(out, in)]++;
    }
    if (found[CROP_VIEWS])
        fail("%zu images are none of the views", found[CROP_VIEWS]);
    for (size_t v = 0; v < CROP_VIEWS; v++) // 37 are expected, give or take 6
        if (found[v] < 7 || found[v] > 67)
            fail("view %zu came %zu times in %d", v, found[v], DRAWS);
    verdict("crop-flip: every image one of 162 views, all of them as often");
}

enum { ELASTIC_SIDE = 28, ELASTIC_STEP = 9, ELASTIC_DRAWS = 1000 };

// Channels: ELASTIC_STEP * row, ELASTIC_STEP * column, white. So a pixel tells where it came from.
static void draw_map(uint8_t *image) {
    for (size_t y = 0; y < ELASTIC_SIDE; y++)
        for (size_t x = 0; x < ELASTIC_SIDE; x++) {
            *image++ = (uint8_t)(ELASTIC_STEP * y);
            *image++ = (uint8_t)(ELASTIC_STEP * x);
            *image++ = 255;
        }
}

typedef struct FieldSums { // sums over pixels in the middle
    double count, sum[2], squares[2], product, steps[2], largest;
    size_t outside, gray; // pixels that came from outside, or from the border
} FieldSums;

// How far pixel (y, x) came from, down and right.
static void displacement(double d[2], const uint8_t *image, size_t y, size_t x) {
    const uint8_t *pixel = image + (y * ELASTIC_SIDE + x) * 3;
    d[0] = pixel[0] / (double)ELASTIC_STEP - (double)y;
    d[1] = pixel[1] / (double)ELASTIC_STEP - (double)x;
}

// Within the blur's reach of the border, 12 pixels, the field is smaller: only the middle counts.
static void measure_field(FieldSums *f, const uint8_t *image) {
    for (size_t y = 12; y < ELASTIC_SIDE - 12; y++)
        for (size_t x = 12; x < ELASTIC_SIDE - 12; x++) {
            double d[2], next[2];
            displacement(d, image, y, x);
            displacement(next, image, y, x + 1);
            f->count++;
            f->product += d[0] * d[1];
            for (size_t i = 0; i < 2; i++) {
                f->sum[i] += d[i];
                f->squares[i] += d[i] * d[i];
                f->steps[i] += (next[i] - d[i]) * (next[i] - d[i]);
                f->largest = fmax(f->largest, fabs(d[i]));
            }
        }
    for (size_t i = 0; i < ELASTIC_SIDE * ELASTIC_SIDE; i++) {
        f->outside += image[3 * i + 2] == 0;
        f->gray += image[3 * i + 2] > 0 && image[3 * i + 2] < 255;
    }
}

/* A uniform field in [-34, 34) has a deviation of 34 / sqrt(3). Blurred with sigma 4 in two
   directions, a sum with weights whose squares add up to 1 / (4 pi sigma^2), it keeps 1.38 pixels
   of them; neighbors then differ by 0.244, and by 0.25 in bytes. */
static void test_elastic_field(void) {
    static uint8_t in[ELASTIC_SIDE * ELASTIC_SIDE * 3], out[sizeof in];
    Shape s = {ELASTIC_SIDE, ELASTIC_SIDE, 3};
    FieldSums f = {0};
    size_t changed = 0;
    draw_map(in);
    for (size_t i = 0; i < ELASTIC_DRAWS; i++) {
        RandomKey key = {.seed = 3, .epoch = 1 + i % 7, .first = i, .stride = 1};
        augment_elastic(out, in, s, &key);
        measure_field(&f, out);
        changed += memcmp(in, out, sizeof in) != 0;
    }
    for (size_t i = 0; i < 2; i++) {
        double mean = f.sum[i] / f.count, deviation = sqrt(f.squares[i] / f.count);
        double step = sqrt(f.steps[i] / f.count);
        if (!(fabs(mean) < .25 && deviation > 1.25 && deviation < 1.52 && step > .22 && step < .28))
            fail("direction %zu: mean %.3f, deviation %.3f, neighbors differ by %.3f", i, mean,
                 deviation, step);
    }
    double together = f.product / sqrt(f.squares[0] * f.squares[1]);
    if (!(fabs(together) < .2))
        fail("down and right move together: correlation %.2f", together);
    if (!(f.largest < 7) || changed != ELASTIC_DRAWS)
        fail("largest %.1f pixels, %zu of %d images changed", f.largest, changed, ELASTIC_DRAWS);
    if (f.outside == 0 || f.gray == 0 || f.outside > ELASTIC_DRAWS * 40)
        fail("%zu pixels black, %zu gray at the border", f.outside, f.gray);
    verdict("elastic: how far pixels move, black outside");
}

enum { VIEW_IMAGES = 45, VIEW_SIZE = 9 * 8 * 3 };
static const DatasetInfo view_info = {.name = "views",
                                      .shape = {9, 8, 3},
                                      .classes = VIEW_IMAGES,
                                      .counts = {VIEW_IMAGES},
                                      .mean = {.1, .2, .3},
                                      .std = {.5, .25, .125}};

// Random images, each with its own number as label.
static Dataset view_dataset(void) {
    static uint8_t images[VIEW_IMAGES * VIEW_SIZE], labels[VIEW_IMAGES];
    for (size_t i = 0; i < sizeof images; i++)
        images[i] = (uint8_t)draw_size(1, 255);
    for (size_t i = 0; i < VIEW_IMAGES; i++)
        labels[i] = (uint8_t)i;
    return (Dataset){&view_info, VIEW_IMAGES, images, labels};
}

// All images of epoch 3 from batch `first` on, where they belong; returns at which position.
static size_t load_views(Array *views, uint8_t *labels, const Dataset *data, Augment *augment,
                         size_t batch, size_t workers, size_t first) {
    Loader l;
    plan_loader(&l, data, batch, workers, augment, on_cpu);
    loader_start(&l, 21, 2, 0); // an epoch left early
    loader_next(&l);
    loader_start(&l, 21, 3, first);
    size_t position = first * batch;
    for (const Batch *b; (b = loader_next(&l)); position += b->n) {
        if (b->key.first != position)
            fail("a batch is at position %zu, expected %zu", b->key.first, position);
        memcpy(views->at + position * VIEW_SIZE, b->images, b->n * VIEW_SIZE * sizeof(real));
        memcpy(labels + position, b->labels, b->n);
    }
    if (position != VIEW_IMAGES)
        fail("the epoch ended at position %zu", position);
    loader_free(&l);
    return first * batch;
}

// The same from the function itself, image by image.
static Array expected_views(const Dataset *data, Augment *augment, const uint8_t *labels) {
    Array views = array(VIEW_IMAGES * VIEW_SIZE, 0);
    for (size_t i = 0; i < VIEW_IMAGES; i++) {
        RandomKey key = {.seed = 21, .epoch = 3, .first = i, .stride = 1};
        uint8_t bytes[VIEW_SIZE];
        memcpy(bytes, data->images + labels[i] * VIEW_SIZE, VIEW_SIZE);
        if (augment)
            augment(bytes, data->images + labels[i] * VIEW_SIZE, data->info->shape, &key);
        for (size_t p = 0; p < VIEW_SIZE; p++)
            views.at[i * VIEW_SIZE + p] =
                ((real)bytes[p] / 255 - (real)view_info.mean[p % 3]) / (real)view_info.std[p % 3];
    }
    return views;
}

static void test_augmented_loader(size_t augmentation) {
    static const size_t runs[][3] = {{8, 1, 0}, {8, 4, 0}, {13, 4, 0}, {1, 2, 0}, {8, 3, 2}};
    Augment *augment = augmentations[augmentation].augment;
    Dataset data = view_dataset();
    uint8_t labels[VIEW_IMAGES];
    for (size_t run = 0; run < sizeof runs / sizeof *runs; run++) {
        Array views = array(VIEW_IMAGES * VIEW_SIZE, guard_value);
        size_t first =
            load_views(&views, labels, &data, augment, runs[run][0], runs[run][1], runs[run][2]);
        Array want = expected_views(&data, augment, labels);
        size_t at = first * VIEW_SIZE;
        check_tensor("images", views.at + at, want.at + at, NULL, want.count - at);
        free_arrays((Array[]){views, want}, 2 * sizeof(Array));
    }
    char name[96];
    snprintf(name, sizeof name, "loader: augmentation %s, whatever the batches and workers",
             augmentations[augmentation].name);
    verdict("%s", name);
}

static double between(double a, double b, double share_of_b) {
    return a + share_of_b * (b - a);
}

// Channel c of the image at a position in pixels, from the four pixels around it
static double pixel_at(const real *image, Shape s, double y, double x, size_t c) {
    const size_t top = (size_t)y, bottom = min_size(top + 1, s.h - 1);
    const size_t left = (size_t)x, right = min_size(left + 1, s.w - 1);
    const real *above = image + top * s.w * s.c + c, *below = image + bottom * s.w * s.c + c;
    return between(between((double)above[left * s.c], (double)above[right * s.c], x - (double)left),
                   between((double)below[left * s.c], (double)below[right * s.c], x - (double)left),
                   y - (double)top);
}

// The position in an image of `count` pixels where pixel i of the enlarged one reads
static double read_position_of(size_t i, size_t factor, size_t count) {
    return fmin(fmax(((double)i + .5) / (double)factor - .5, 0), (double)(count - 1));
}

// want = the image, enlarged
static void expect_enlarged(real *want, const real *image, Shape s, size_t factor) {
    const size_t width = s.w * factor;
    for (size_t i = 0; i < s.h * factor * width * s.c; i++) {
        const double y = read_position_of(i / s.c / width, factor, s.h);
        const double x = read_position_of(i / s.c % width, factor, s.w);
        want[i] = (real)pixel_at(image, s, y, x, i % s.c);
    }
}

// Computed in float, also where real is double
static void check_enlarged(const real *got, const real *want, size_t count, real largest) {
    Array bound = array(count, 0);
    for (size_t i = 0; i < count; i++)
        bound.at[i] = 8 * (real)0x1p-24 * largest;
    check_tensor("enlarged", got, want, bound.at, count);
    free_arrays(&bound, sizeof bound);
}

static void test_enlarge(void) {
    static const Shape shapes[] = {{1, 1, 1}, {1, 5, 2}, {4, 1, 1}, {5, 9, 3}, {28, 28, 1}};
    static const size_t factors[] = {1, 2, 3, 7, 8};
    for (size_t i = 0; i < LENGTH(shapes) * LENGTH(factors); i++) {
        const Shape s = shapes[i / LENGTH(factors)];
        const size_t factor = factors[i % LENGTH(factors)], count = shape_size(s) * factor * factor;
        snprintf(context, sizeof context, "%zu x %zu x %zu, %zu times", s.h, s.w, s.c, factor);
        Array image = array(shape_size(s), 0), want = array(count, 0);
        Array got = array(count, guard_value);
        for (size_t p = 0; p < shape_size(s); p++)
            image.at[p] = (real)(float)draw_real();
        enlarge(got.at, image.at, s, factor);
        expect_enlarged(want.at, image.at, s, factor);
        check_enlarged(got.at, want.at, count, 5);
        if (factor == 1)
            check_tensor("not enlarged", got.at, image.at, NULL, count);
        free_arrays((Array[]){image, want, got}, 3 * sizeof(Array));
    }
    verdict("--resize: bilinear interpolation");
}

// Images are augmented in their own size, normalized, and then enlarged.
static void test_resized_loader(size_t augmentation) {
    enum { FACTOR = 3, LARGE = FACTOR * FACTOR * VIEW_SIZE };
    Augment *augment = augmentations[augmentation].augment;
    Dataset data = view_dataset();
    Consumer consumer = on_cpu;
    Loader l;
    consumer.resize = FACTOR * view_info.shape.h;
    plan_loader(&l, &data, 8, 3, augment, consumer);
    loader_start(&l, 21, 3, 0);
    for (const Batch *b; (b = loader_next(&l));)
        for (size_t i = 0; i < b->n; i++) {
            const RandomKey key = {21, 3, position_of(b->key, i), 1};
            const uint8_t *image = data.images + b->labels[i] * VIEW_SIZE;
            uint8_t bytes[VIEW_SIZE];
            real view[VIEW_SIZE], want[LARGE];
            memcpy(bytes, image, VIEW_SIZE);
            if (augment)
                augment(bytes, image, view_info.shape, &key);
            normalize(&l, view, bytes);
            expect_enlarged(want, view, view_info.shape, FACTOR);
            check_enlarged(b->images + i * LARGE, want, LARGE, 10);
        }
    loader_free(&l);
    verdict("loader: --resize with augmentation %s", augmentations[augmentation].name);
}

// Another seed, epoch or position: another view of the same image, in nearly all cases.
static void test_augmentation_draws(size_t augmentation) {
    Augment *augment = augmentations[augmentation].augment;
    Dataset data = view_dataset();
    for (size_t what = 0; what < 3; what++) {
        size_t same = 0;
        for (size_t i = 0; i < 200; i++) {
            uint8_t one[VIEW_SIZE], other[VIEW_SIZE];
            RandomKey key = {.seed = 4, .epoch = 5, .first = i, .stride = 1};
            augment(one, data.images, view_info.shape, &key);
            key.seed += what == 0;
            key.epoch += what == 1;
            key.first += what == 2;
            augment(other, data.images, view_info.shape, &key);
            same += memcmp(one, other, VIEW_SIZE) == 0;
        }
        if (same > 10)
            fail("%zu of 200 views are the same by another %s", same,
                 (const char *[]){"seed", "epoch", "position"}[what]);
    }
    char name[96];
    snprintf(name, sizeof name, "augmentation %s: drawn by seed, epoch and position",
             augmentations[augmentation].name);
    verdict("%s", name);
}

static void test_augmentation(void) {
    test_crop_flip();
    test_elastic_field();
    for (size_t i = 0; i < LENGTH(augmentations); i++)
        test_augmented_loader(i);
    test_enlarge();
    for (size_t i = 0; i < LENGTH(augmentations); i++)
        test_resized_loader(i);
    for (size_t i = 1; i < LENGTH(augmentations); i++)
        test_augmentation_draws(i);
}

// A student's model, without synthetic images as the last choice
static void load_absent(void) {
    static const Model model = {
        .name = "absent", .datasets = "mnist cifar10", .synthetic_like = "mnist"};
    static Run run = {.model = &model, .settings = {.dataset = "auto", .data = "/nonexistent"}};
    setup_data(&run);
}

static void test_absent_data(void) {
    const char *expected = "cnn: error: mnist: expected train-images-idx3-ubyte (or .gz), found "
                           "none in /nonexistent/mnist or, with --dataset mnist, in /nonexistent";
    const Ending e = call_in_child(load_absent);
    if (!WIFEXITED(e.status) || WEXITSTATUS(e.status) != 1 || !strstr(e.text, expected))
        fail("status %x, expected exit status 1 and %s, found %s", (unsigned)e.status, expected,
             e.text);
    verdict("data that a model needs and that is not there");
}

static void test_data(void) {
    test_cifar_files();
    test_absent_data();
    test_large_records();
    test_synthetic_classes();
    test_synthetic_noise();
    test_synthetic_pixels();
    test_loader_order();
    test_loader_left_early();
    test_loader_shares();
    test_augmentation();
}
