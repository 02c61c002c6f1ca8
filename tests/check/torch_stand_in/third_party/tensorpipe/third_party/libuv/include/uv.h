#include "uv/version.h"
