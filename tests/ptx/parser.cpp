/* parser.cpp - reads the PTX that nvcc writes, a kernel at its first use. See ptx.h. */

#include "ptx.h"
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <cxxabi.h>
#include <set>
#include <sstream>

std::map<std::string, Kernel> kernels;
static std::set<std::string> dynamic_shared; // the names of dynamic shared memory

[[noreturn]] void refuse(const Kernel &k, const std::string &what) {
    fprintf(stderr, "ptx: %s: %s\n", k.name.c_str(), what.c_str());
    exit(3);
}

/* ---- Words */

static bool in_name(char c) {
    return isalnum((unsigned char)c) || strchr("_$%.", c);
}

static std::string trim(const std::string &s) {
    const size_t b = s.find_first_not_of(" \t\n"), e = s.find_last_not_of(" \t\n");
    return b == std::string::npos ? "" : s.substr(b, e - b + 1);
}

static std::vector<std::string> split(const std::string &s, char by) { // outside of brackets
    std::vector<std::string> parts(1);
    int depth = 0;
    for (char c : s) {
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        if (c == by && depth == 0)
            parts.emplace_back();
        else
            parts.back() += c;
    }
    for (std::string &part : parts)
        part = trim(part);
    return parts.size() == 1 && parts[0].empty() ? std::vector<std::string>() : parts;
}

static bool begins(const std::string &s, const char *with) {
    return s.compare(0, strlen(with), with) == 0;
}

static std::string without_brackets(const std::string &s) {
    return s.substr(1, s.size() - 2);
}

static std::vector<std::string> vector_of(const std::string &s) {
    return s[0] == '{' ? split(without_brackets(s), ',') : std::vector<std::string>{s};
}

static u32 align(u32 n, u32 to) {
    return (n + to - 1) / to * to;
}

/* ---- Declarations, such as .shared .align 16 .b8 tiles[33792] */

struct Declared {
    u32 alignment, size;
    std::string name;
};

static Declared declared(const std::string &text) {
    Declared d = {1, 0, ""};
    u32 element = 1, count = 1;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        const size_t bracket = word.find('[');
        if (word == ".align")
            words >> d.alignment;
        else if (word.size() > 2 && word[0] == '.' && isdigit((unsigned char)word[2]))
            element = (u32)atoi(word.c_str() + 2) / 8;
        else if (word[0] != '.')
            d.name = word.substr(0, bracket);
        if (bracket != std::string::npos)
            count = (u32)atoi(word.c_str() + bracket + 1);
    }
    d.alignment = std::max(d.alignment, element);
    d.size = element * count;
    return d;
}

/* ---- Modules */

static std::string name_in_source(const std::string &mangled) {
    int status;
    char *demangled = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
    std::string name = demangled ? demangled : mangled;
    free(demangled);
    name = name.substr(0, name.rfind('(')); // without the arguments
    return begins(name, "void ") ? name.substr(5) : name;
}

static std::string until(const std::string &text, size_t at, char end) {
    return text.substr(at, text.find(end, at) - at);
}

// The numbers of those files in .loc that are kernels, not CUDA's headers
static std::vector<int> *kernel_files(const std::string &text) {
    auto *files = new std::vector<int>;
    for (size_t at = 0; (at = text.find("\n.file", at)) != std::string::npos; at++)
        if (until(text, at + 1, '\n').find(".cu\"") != std::string::npos)
            files->push_back(atoi(text.c_str() + at + 6));
    return files;
}

static std::string body_at(const std::string &text, size_t at) { // after its {
    int depth = 1;
    size_t end = at;
    for (; end < text.size() && depth; end++)
        depth += (text[end] == '{') - (text[end] == '}');
    return text.substr(at, end - 1 - at);
}

void load_module(const std::string &text) {
    const std::vector<int> *files = kernel_files(text);
    for (size_t at = 0; (at = text.find("\n.extern .shared", at)) != std::string::npos; at++)
        dynamic_shared.insert(declared(until(text, at + 9, ';')).name);
    for (size_t at = 0; (at = text.find(".entry ", at)) != std::string::npos; at++) {
        const std::string mangled = until(text, at + 7, '(');
        Kernel &k = kernels[mangled];
        k.name = name_in_source(mangled);
        k.files = files;
        k.head = until(text, at + 7, '{');
        k.body = body_at(text, at + 8 + k.head.size());
    }
}

/* ---- Kernels */

namespace {
struct Parser {
    Kernel &k;
    struct Bank { // registers of a type
        u32 at, count;
        char letter; // '4', '8', 'p'
        uint8_t bytes;
    };
    std::map<std::string, Bank> banks;  // "%r" of %r<100>, or a name
    std::map<std::string, u64> symbols; // addresses of shared and local memory, and parameters
    std::map<std::string, int> labels;
    std::vector<std::pair<size_t, std::string>> branches;
    int line = 0;

    [[noreturn]] void refuse(const std::string &what) {
        ::refuse(k, "line " + std::to_string(line) + ": " + what);
    }

    u32 reserve(u32 bytes) {
        const u32 at = align(k.register_bytes, 32);
        k.register_bytes = at + bytes;
        return at;
    }

    /* -- Operands */

    void declare(const std::string &text) { // .reg .b32 %r<100> or .reg .b32 a, b
        const std::string rest = trim(text.substr(4));
        const std::string type = rest.substr(0, rest.find_first_of(" \t"));
        const bool predicate = type == ".pred";
        const uint8_t bytes = predicate ? 4 : (uint8_t)(atoi(type.c_str() + 2) / 8);
        const char letter = predicate ? 'p' : bytes == 8 ? '8' : '4';
        for (std::string name : split(rest.substr(type.size()), ',')) {
            u32 count = 1;
            if (const size_t angle = name.find('<'); angle != std::string::npos) {
                count = (u32)atoi(name.c_str() + angle + 1);
                name = name.substr(0, angle);
            }
            banks[name] = {reserve(count * WARP * (bytes == 8 ? 8 : 4)), count, letter, bytes};
        }
    }

    const Bank *bank(const std::string &name, u32 &index) {
        auto found = banks.find(name);
        index = 0;
        if (found == banks.end()) {
            const size_t digits = name.find_last_not_of("0123456789") + 1;
            found = banks.find(name.substr(0, digits));
            index = (u32)atoi(name.c_str() + digits);
        }
        return found == banks.end() || index >= found->second.count ? nullptr : &found->second;
    }

    u64 number(const std::string &s) {
        if (s[0] == '0' && s.size() > 2 && strchr("fFdD", s[1]))
            return strtoull(s.c_str() + 2, nullptr, 16);
        if (isdigit((unsigned char)s[0]))
            return strtoull(s.c_str(), nullptr, 0);
        if (s[0] == '-')
            return (u64)strtoll(s.c_str(), nullptr, 0);
        const auto found = symbols.find(s);
        if (found == symbols.end())
            refuse("unknown name " + s);
        return found->second;
    }

    u32 constant(u64 bits, char letter) {
        const u32 size = letter == '8' ? 8 : 4;
        bits = letter == 'p' ? (bits ? ~0u : 0) : letter == '4' ? (u32)bits : bits;
        const auto [found, fresh] = k.constants.try_emplace({bits, size}, 0);
        if (fresh)
            found->second = reserve(WARP * size);
        return found->second;
    }

    // Where an operand's register is; those of constants and special registers are made.
    u32 operand(const std::string &s, char letter) {
        u32 index;
        if (s == "_")
            return 0;
        if (const Bank *b = bank(s, index)) {
            if (b->letter != letter)
                refuse(s + " has another size than its instruction expects");
            return b->at + index * WARP * (letter == '8' ? 8 : 4);
        }
        if (s[0] != '%')
            return constant(number(s), letter);
        const auto [found, fresh] = k.specials.try_emplace(s, 0);
        if (fresh)
            found->second = reserve(WARP * 4);
        return found->second;
    }

    // [register + offset], [name + offset], [offset]
    void address(Inst &in, const std::string &s, u32 at) {
        const std::string inner = without_brackets(s);
        const size_t plus = inner.find('+');
        const std::string base = trim(inner.substr(0, plus));
        u32 index;
        in.offset = plus == std::string::npos ? 0 : strtoll(inner.c_str() + plus + 1, nullptr, 0);
        in.address = 0;
        if (const Bank *b = bank(base, index)) {
            in.address = b->letter == '8' ? 8 : 4;
            in.o[at] = b->at + index * WARP * in.address;
        } else {
            in.offset += (s64)number(base);
        }
    }

    /* -- Instructions */

    void memory(Inst &in, const std::vector<std::string> &words,
                const std::vector<std::string> &operands) {
        static const std::map<std::string, Space> spaces = {
            {"global", GLOBAL}, {"shared", SHARED}, {"local", LOCAL}, {"param", PARAM}};
        in.read = words[0] == "ld";
        in.run = in.read ? load : store;
        for (size_t i = 1; i + 1 < words.size(); i++) {
            const auto found = spaces.find(words[i]);
            if (found != spaces.end())
                in.space = found->second;
            else if (words[i] != "nc" && words[i] != "v2" && words[i] != "v4")
                in.run = unknown;
        }
        const std::string &type = words.back();
        const std::vector<std::string> elements = vector_of(operands[!in.read]);
        in.count = (u32)elements.size();
        in.bytes = (uint8_t)(atoi(type.c_str() + 1) / 8);
        in.sign = type[0] == 's';
        in.of = in.space == SHARED                       ? in.read ? LD_SHARED : ST_SHARED
                : in.space == PARAM || in.space == LOCAL ? PARAM_LOCAL
                : in.read                                ? LD_GLOBAL
                                                         : ST_GLOBAL;
        for (size_t i = 0; i < elements.size(); i++) {
            u32 index;
            const Bank *b = bank(elements[i], index);
            in.wide = b ? b->bytes : in.bytes == 8 ? 8 : 4;
            in.o[i] = operand(elements[i], in.wide == 8 ? '8' : '4');
        }
        if (in.bytes == 0 || in.bytes > in.wide || in.space == NO_SPACE ||
            (in.sign && in.bytes > 1 && in.bytes < in.wide))
            in.run = unknown;
        address(in, operands[in.read], 4);
    }

    // The letters of Operation::operands
    void set_operand(Inst &in, size_t i, const std::string &s, char letter) {
        if (letter == '@')
            address(in, s, (u32)i);
        else if (letter == '*')
            in.o[i] = operand(without_brackets(s), '8');
        else if (letter == 'b')
            in.bytes = (uint8_t)number(s);
        else if (letter == 'n')
            in.offset = (s64)number(s);
        else if (letter == 'l')
            branches.push_back({k.code.size(), s});
        else
            in.o[i] = operand(s, letter);
    }

    void instruction(Inst &in, std::string op, const std::vector<std::string> &operands) {
        std::vector<std::string> flat;
        if (begins(op, "ld.") || begins(op, "st."))
            return memory(in, split(op, '.'), operands);
        if (begins(op, "mov.") && operands[0][0] == '{') // two halves of a register
            op.replace(0, 3, "unpack");
        if (begins(op, "mov.") && operands[1][0] == '{')
            op.replace(0, 3, "pack");
        for (const std::string &o : operands)
            for (const std::string &element : vector_of(o))
                for (const std::string &one : split(element, '|'))
                    flat.push_back(one);
        const Operation *found = find_operation(op);
        if (found && found->operands.size() != flat.size()) // another form of it
            found = nullptr;
        in.run = found ? found->run : unknown;
        in.of = found ? found->of : CONTROL;
        in.kind = found ? found->kind : PLAIN;
        for (size_t i = 0; found && i < found->operands.size(); i++)
            set_operand(in, i, flat.at(i), found->operands[i]);
        if (in.kind == BARRIER && in.offset != 0)
            refuse("only barrier 0 is known");
    }

    void add(std::string s) {
        Inst in = {};
        in.guard = -1;
        in.line = line;
        in.text = s;
        if (s[0] == '@') {
            const size_t space = s.find_first_of(" \t");
            in.negated = s[1] == '!';
            in.guard = (s32)operand(s.substr(1 + in.negated, space - 1 - in.negated), 'p');
            s = trim(s.substr(space));
        }
        const size_t space = std::min(s.find_first_of(" \t{"), s.size());
        const std::string op = s.substr(0, space);
        const std::vector<std::string> operands = split(s.substr(space), ',');
        in.number = (int)k.code.size();
        instruction(in, op, operands);
        k.code.push_back(in);
    }

    /* -- The whole kernel */

    void head(void) {
        const size_t open = k.head.find('('), close = k.head.find(')');
        for (const std::string &p : split(k.head.substr(open + 1, close - open - 1), ',')) {
            const Declared d = declared(p);
            k.param_bytes = align(k.param_bytes, d.alignment);
            k.params.push_back({k.param_bytes, d.size});
            symbols[d.name] = k.param_bytes;
            k.param_bytes += d.size;
        }
        if (const size_t most = k.head.find(".maxntid "); most != std::string::npos) {
            u32 x = 1, y = 1, z = 1;
            sscanf(k.head.c_str() + most, ".maxntid %u, %u, %u", &x, &y, &z);
            k.max_threads = x * y * z;
        }
    }

    // Shared and local memory are declared before their use; dynamic memory follows the static one.
    void variables(void) {
        for (const char *space : {".shared .align", ".local .align"})
            for (size_t at = 0; (at = k.body.find(space, at)) != std::string::npos; at++) {
                const Declared d = declared(until(k.body, at, ';'));
                u32 &bytes = space[1] == 's' ? k.shared : k.local;
                symbols[d.name] = bytes = align(bytes, d.alignment);
                bytes += d.size;
            }
        k.dynamic_at = align(k.shared, 128);
        for (const std::string &name : dynamic_shared)
            symbols[name] = k.dynamic_at;
    }

    // Of cnn_kernels.cu, also where a function of a header was inlined there
    void location(const std::string &loc) {
        int file = 0, l = 0;
        sscanf(loc.c_str(), ".loc %d %d", &file, &l);
        const size_t inlined = loc.find("inlined_at");
        if (std::find(k.files->begin(), k.files->end(), file) == k.files->end() &&
            inlined != std::string::npos)
            sscanf(loc.c_str() + inlined + 10, "%d %d", &file, &l);
        line = l;
    }

    // Returns where it ends.
    size_t statement(size_t at) {
        size_t end = at;
        while (in_name(k.body[end]))
            end++;
        if (k.body[end] == ':') {
            labels[k.body.substr(at, end - at)] = (int)k.code.size();
            return end + 1;
        }
        const std::string s = trim(until(k.body, at, ';'));
        if (begins(s, ".reg"))
            declare(s);
        else if (s[0] != '.')
            add(s);
        return k.body.find(';', at) + 1;
    }

    void body(void) {
        for (size_t at = 0; at < k.body.size();) {
            const std::string rest = k.body.substr(at, 5);
            if (isspace((unsigned char)rest[0]) || strchr("{};", rest[0])) {
                at++;
            } else if (begins(rest, "//") || rest == ".loc\t" || rest == ".loc ") {
                if (rest[0] == '.')
                    location(until(k.body, at, '\n'));
                at = k.body.find('\n', at);
            } else {
                at = statement(at);
            }
        }
    }

    void parse(void) {
        head();
        variables();
        reserve(WARP * 8); // at 0, for what is ignored
        body();
        const Kind last = k.code.empty() ? PLAIN : k.code.back().kind;
        if ((last != RETURN && last != BRANCH) || k.code.back().guard >= 0)
            refuse("the kernel does not end with ret, or a branch back");
        for (const auto &b : branches) {
            const auto found = labels.find(b.second);
            if (found == labels.end())
                refuse("no label " + b.second);
            k.code[b.first].target = found->second;
        }
        k.counts.resize(k.code.size());
        k.register_bytes = align(k.register_bytes, 64);
    }
};
} // namespace

void parse_kernel(Kernel *k) {
    Parser{*k, {}, {}, {}, {}, 0}.parse();
}
