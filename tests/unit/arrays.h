/* arrays.h - arrays between guard values, which show when a function writes outside of its
   output. tests/check.h has the random numbers and the comparison. */

static const bool is_double = sizeof(real) == sizeof(double);
static bool quick;

enum { GUARD = 128 / sizeof(real) }; // what zeroed_alloc() leaves after an array
static const real guard_value = -12345;

// Guard values precede and follow the numbers, both inside of what zeroed_alloc() gave.
typedef struct Array {
    real *base, *at;
    size_t count;
} Array;

static Array array(size_t count, real guard) {
    Array a = {.count = count};
    a.base = must_alloc((count + ALIGN) * sizeof(real), "a test");
    a.at = a.base + ALIGN; // keeps the alignment of the arenas
    for (size_t i = 0; i < count + ALIGN + GUARD; i++)
        a.base[i] = i - ALIGN < count ? (real)NAN : guard;
    return a;
}

// What lies around an input is NaN: whoever uses it spoils the result.
static Array random_array(size_t count) {
    Array a = array(count, (real)NAN);
    for (size_t i = 0; i < count; i++)
        a.at[i] = draw_real();
    return a;
}

static Array absolute(const Array *from) {
    Array a = array(from->count, (real)NAN);
    for (size_t i = 0; i < a.count; i++)
        a.at[i] = (real)fabs((double)from->at[i]);
    return a;
}

static void check_guards(const char *name, const Array *a) {
    for (size_t i = 0; i < a->count + ALIGN + GUARD; i++)
        if (i - ALIGN >= a->count && a->base[i] != guard_value)
            fail("%s: wrote at index %td of %zu", name, (ptrdiff_t)i - ALIGN, a->count);
}

static void free_arrays(void *arrays, size_t size) // an Inputs, a Results or the like
{
    for (size_t i = 0; i < size / sizeof(Array); i++)
        free(((Array *)arrays)[i].base);
}
